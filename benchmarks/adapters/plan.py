"""Which runs are left: rates are tuned on seeds of their own, then other seeds are judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.adapters.cases import CASES
from benchmarks.adapters.training import FACTOR, FIRST_RATES, RATE, TUNING_SEEDS, Job

MOST_RATES = 7
"""Rates that are tried for an arm at most."""


def tuned_rate(
    records: Sequence[dict[str, Any]], case: str, label: str
) -> tuple[float, list[float]]:
    """Return the best rate so far and those that were tried on all tuning seeds."""
    scores: dict[float, dict[int, float]] = defaultdict(dict)
    for record in records:
        if (record["case"], record["arm"]) == (case, label) and record["seed"] in TUNING_SEEDS:
            scores[record["rate"]][record["seed"]] = record["val_loss"]
    tried = {
        rate: fmean(own.values()) for rate, own in scores.items() if len(own) == len(TUNING_SEEDS)
    }
    best = min(tried, key=lambda rate: tried[rate], default=0.0)
    return best, sorted(tried)


def next_job(
    records: Sequence[dict[str, Any]],
    case: str,
    arm: str,
    options: tuple[tuple[str, Any], ...] = (),
) -> Job | None:
    """Return the next run of an arm, None where all are done."""
    done = {record["name"] for record in records}
    label = Job(case, arm, 0.0, 0, options).label
    first = FIRST_RATES.get(arm, RATE)
    rates = [first / FACTOR, first, first * FACTOR]
    while True:
        for rate in rates:
            for seed in TUNING_SEEDS:
                job = Job(case, arm, float(f"{rate:.3g}"), seed, options)
                if job.name not in done:
                    return job
        best, tried = tuned_rate(records, case, label)
        if best == tried[0] and len(tried) < MOST_RATES:
            rates = [best / FACTOR]
        elif best == tried[-1] and len(tried) < MOST_RATES:
            rates = [best * FACTOR]
        else:
            break
    for seed in range(CASES[case].seeds):
        job = Job(case, arm, best, seed, options)
        if job.name not in done:
            return job
    return None
