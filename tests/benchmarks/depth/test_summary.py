"""Equal-loss compute ratios: interpolated between static runs at their best rate, never beyond."""

from __future__ import annotations

import math

import pytest

from benchmarks.depth.cells import CELLS, grown, static
from benchmarks.depth.summary import arms_of, equal_loss_compute, print_summary, static_curve

CELL = CELLS["python-short"]


def record(job: object, flops: float, loss: float, steps: int = 100) -> dict[str, object]:
    return {**job.as_record(), "flops": flops, "loss": loss, "steps": steps, "seconds": 1.0}  # type: ignore[attr-defined]


def test_compute_is_interpolated_in_log_log() -> None:
    curve = [(1.0, 4.0), (4.0, 1.0)]
    assert equal_loss_compute(curve, 2.0) == pytest.approx(2.0)
    assert equal_loss_compute(curve, 4.0) == pytest.approx(1.0)


@pytest.mark.parametrize("loss", [0.9, 4.1])
def test_nothing_is_extrapolated(loss: float) -> None:
    assert equal_loss_compute([(1.0, 4.0), (4.0, 1.0)], loss) is None


def test_the_static_curve_is_that_of_its_best_rate_with_means_over_seeds() -> None:
    records = [
        record(static(CELL, 12, length=0.5), 1.0, 0.9, steps=50),
        record(static(CELL, 12), 2.0, 0.7),
        record(static(CELL, 12, seed=1), 2.0, 0.8),
        record(static(CELL, 12, rate=1e-3), 2.0, 0.85),
        record(static(CELL, 12, rate=4e-3), 2.0, 0.95),
    ]
    assert static_curve(arms_of(records), 12) == [(1.0, 0.9), (2.0, pytest.approx(0.75))]


def test_the_table_has_the_ratio_of_grown_networks_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [
        record(static(CELL, 12, length=0.5), 1.0, 2.0, steps=50),
        record(static(CELL, 12), 4.0, 1.0),
        record(grown(CELL), 1.0, math.sqrt(2.0)),
    ]
    print_summary(records)
    lines = [line for line in capsys.readouterr().out.splitlines() if "lr0.002" in line]
    assert [line.split("|")[6].strip() for line in lines] == ["2.00", "", ""]
