"""Rates are tuned on seeds of their own, inside the grid, before others are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.adapters.cases import CASES
from benchmarks.adapters.plan import next_job, tuned_rate
from benchmarks.adapters.training import RATE, TUNING_SEEDS, Job


def run_all(loss: Callable[[float], float]) -> list[dict[str, Any]]:
    """Return the records of an arm whose validation loss is a function of the rate."""
    records: list[dict[str, Any]] = []
    while job := next_job(records, "cnn", "esper"):
        records.append(
            {
                "name": job.name,
                "case": job.case,
                "arm": job.label,
                "rate": job.rate,
                "seed": job.seed,
                "val_loss": loss(job.rate),
            }
        )
        assert len(records) < 50
    return records


@pytest.mark.parametrize("best", [RATE / 4, RATE, RATE * 4])
def test_the_grid_is_widened_until_the_best_rate_is_inside(best: float) -> None:
    records = run_all(lambda rate: abs(rate - best))
    chosen, tried = tuned_rate(records, "cnn", "esper")
    assert chosen == pytest.approx(best)
    assert tried[0] < chosen < tried[-1]
    judged = [record for record in records if record["seed"] not in TUNING_SEEDS]
    assert [record["seed"] for record in judged] == list(range(CASES["cnn"].seeds))
    assert {record["rate"] for record in judged} == {chosen}
    assert len(records) == len(TUNING_SEEDS) * len(tried) + CASES["cnn"].seeds


def test_widening_ends() -> None:
    records = run_all(lambda rate: rate)
    assert len(tuned_rate(records, "cnn", "esper")[1]) == 7


def test_settings_have_names_of_their_own() -> None:
    job = Job("cnn", "esper", 0.004, 1, (("moves", ()), ("size", 0.5)))
    assert job.name == "cnn esper moves=none size=0.5 lr0.004 s1"
