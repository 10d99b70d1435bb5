"""A cell is judged by its default rule, and by the best static depth at equal compute."""

from __future__ import annotations

import math

import pytest

from benchmarks.depth.cells import CELLS, Job, doubling, grown, static
from benchmarks.depth.verdict import geometric_mean, judge

CELL = CELLS["python-short"]


def record(job: Job, flops: float, loss: float) -> dict[str, object]:
    return {**job.as_record(), "flops": flops, "loss": loss, "steps": 100, "seconds": 1.0}


STATIC = [record(static(CELL, 12, length=0.75), 1.0, 4.0), record(static(CELL, 12), 4.0, 1.0)]
SIX = [
    record(static(CELL, 6, compute=0.75), 2.0, 1.9),
    record(grown(CELL, doubling(3, 0.3), compute=0.75), 2.01, 1.8),
    record(grown(CELL, doubling(3, 0.4), compute=0.75), 2.0, 1.85),
    record(grown(CELL, doubling(3, 0.3), compute=0.75, start="copy"), 2.0, 1.7),
    record(static(CELL, 3, compute=0.5), 1.5, 0.1),
]


def test_the_front_is_at_the_compute_of_the_default_rule() -> None:
    verdict = judge([*STATIC, *SIX, record(grown(CELL), 2.0, 1.2)], CELL)
    assert verdict is not None
    assert not verdict.is_bound
    # The static network reaches 1.2 with 4 / 1.2 of the compute.
    assert verdict.ratio == pytest.approx(4 / 1.2 / 2.0)
    assert verdict.static.blocks == 6
    assert verdict.grown is not None
    assert verdict.grown.score == 1.8


def test_a_loss_below_every_static_run_gives_a_bound() -> None:
    verdict = judge([*STATIC, *SIX, record(grown(CELL), 2.0, 0.9)], CELL)
    assert verdict is not None
    assert verdict.is_bound
    assert verdict.ratio == 2.0


@pytest.mark.parametrize("loss", [None, 4.1])
def test_a_cell_without_a_default_run_or_above_the_curve_is_not_judged(loss: float | None) -> None:
    default = [] if loss is None else [record(grown(CELL), 2.0, loss)]
    assert judge([*STATIC, *SIX, *default], CELL) is None


def test_other_schedules_are_not_the_default_rule() -> None:
    others = [record(grown(CELL, CELL.later), 2.0, 0.5), record(grown(CELL, rate=1e-3), 2.0, 0.5)]
    assert judge([*STATIC, *SIX, *others], CELL) is None


def test_the_mean_over_cells_is_geometric_with_an_interval() -> None:
    mean, low, high = geometric_mean([1.0, 2.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert math.log(high / mean) == pytest.approx(math.log(mean / low))
    assert low < 1.0
