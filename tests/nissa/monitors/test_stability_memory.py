from __future__ import annotations

import math
from typing import Any

import pytest

from esper.nissa.monitors import MONITORS
from esper.nissa.schema import EpochRow
from tests.nissa.monitors.series_of import as_levels, healthy_round, healthy_update, levels


@pytest.mark.parametrize(
    ("rms", "expected"),
    [
        (None, None),
        (0.5, None),
        (10.0, None),
        (10.1, "warning"),
        (1e-7, "warning"),
        (math.nan, "critical"),
        (math.inf, "critical"),
    ],
)
def test_the_memory_of_the_policy(rms: float | None, expected: str | None) -> None:
    found = levels("lstm_rms", healthy_update(0, lstm_c_rms=rms))
    assert found == as_levels(expected, "cell state")


@pytest.mark.parametrize(
    ("early", "late", "severity"),
    [(1.0, 2.0, None), (1.0, 2.1, "warning"), (None, 2.0, None), (0.0, 2.0, None)],
)
def test_a_memory_that_grows_late_in_an_episode(
    early: float | None, late: float, severity: str | None
) -> None:
    update = healthy_update(0, lstm_c_rms_early=early, lstm_c_rms_late=late)
    assert levels("lstm_drift", update) == as_levels(severity)


def at(step: int, rms: float | None) -> dict[str, Any]:
    return {"step": step, "h_rms": 0.4, "h_max": 0.9, "c_rms": rms, "c_max": 3.0}


@pytest.mark.parametrize(
    ("steps", "is_found"),
    [
        ([at(1, 0.1), at(30, 1.0), at(60, 2.0)], False),
        ([at(1, 0.1), at(30, 1.0), at(60, 2.1)], True),
        # Filling up in the first half is what a memory does.
        ([at(1, 0.1), at(20, 0.9), at(60, 1.0)], False),
        ([at(40, 0.1), at(60, 9.0)], False),
        ([at(60, 9.0)], False),
        ([at(30, None), at(60, 9.0)], False),
        ([], False),
    ],
)
def test_a_memory_that_has_not_settled(steps: list[dict[str, Any]], is_found: bool) -> None:
    expected = {"cell state": "warning"} if is_found else {}
    assert levels("lstm_growth", healthy_update(0, lstm_by_step=steps)) == expected


def test_a_memory_that_was_not_measured_is_no_news() -> None:
    assert levels("lstm_growth", healthy_update(0, lstm_by_step=None)) == {}


@pytest.mark.parametrize(
    ("share", "severity"), [(None, None), (0.85, None), (0.86, "info"), (0.91, "warning")]
)
def test_memory_that_runs_out(share: float | None, severity: str | None) -> None:
    expected = as_levels(severity)
    assert levels("gpu_memory", EpochRow(step=1, gpu_memory_share=share, time=0.0)) == expected
    assert levels("gpu_memory_of_rounds", healthy_round(0, gpu_memory_share=share)) == expected


def test_once_a_minute_is_enough() -> None:
    def found(*samples: tuple[float | None, float]) -> bool:
        rows = [EpochRow(step=1, time=time, gpu_memory_share=share) for time, share in samples]
        return bool(levels("gpu_memory", *rows))

    samples = [(10.0 * tick, 0.95) for tick in range(14)]
    assert [samples[at][0] for at in range(14) if found(*samples[: at + 1])] == [0.0, 60.0, 120.0]
    assert not found((0.0, 0.95), (200.0, 0.5))
    # Without a clock it is told once.
    assert not found((None, 0.95), (None, 0.95))


def test_what_is_about_the_machine_is_marked() -> None:
    volatile = {name for name in MONITORS.names() if MONITORS.get(name).is_volatile}
    assert volatile == {"gpu_memory", "gpu_memory_of_rounds"}
