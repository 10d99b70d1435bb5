from __future__ import annotations

import pytest

from esper.nissa.monitors import MONITORS
from esper.nissa.monitors.resources import check_gpu_memory
from esper.nissa.schema import EpochRow
from tests.nissa.monitors.series_of import healthy_round, levels


@pytest.mark.parametrize(
    ("share", "severity"), [(None, None), (0.85, None), (0.86, "info"), (0.91, "warning")]
)
def test_memory_that_runs_out(share: float | None, severity: str | None) -> None:
    found = check_gpu_memory([(0.0, share)])
    assert (found.severity if found else None) == severity
    expected = {None: severity} if severity else {}
    assert levels("gpu_memory", EpochRow(step=1, gpu_memory_share=share, time=0.0)) == expected
    assert levels("gpu_memory_of_rounds", healthy_round(0, gpu_memory_share=share)) == expected


def test_once_a_minute_is_enough() -> None:
    samples = [(10.0 * tick, 0.95) for tick in range(14)]
    told = [at for at, _ in samples if check_gpu_memory(samples[: int(at / 10) + 1])]
    assert told == [0.0, 60.0, 120.0]
    assert check_gpu_memory([]) is None
    assert check_gpu_memory([(0.0, 0.95), (200.0, 0.5)]) is None
    # Without a clock it is told once.
    assert check_gpu_memory([(None, 0.95), (None, 0.95)]) is None


def test_what_is_about_the_machine_is_marked() -> None:
    volatile = {name for name in MONITORS.names() if MONITORS.get(name).is_volatile}
    assert volatile == {"gpu_memory", "gpu_memory_of_rounds"}
