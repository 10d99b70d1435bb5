"""Tables of the adapter measurement: scores by arm, and differences to PEFT's LoRA by seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from benchmarks.adapters.cases import CASES
from benchmarks.adapters.plan import tuned_rate
from benchmarks.table import print_table

BASELINE = "peft"


def judged(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Return the runs of the judged seeds at the tuned rate, by (case, arm) and seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        key = record["case"], record["arm"]
        if (
            record["seed"] < CASES[record["case"]].seeds
            and record["rate"] == tuned_rate(records, *key)[0]
        ):
            found[key][record["seed"]] = record
    return found


def difference(
    own: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]], key: str = "score"
) -> tuple[float, float, float] | None:
    """Return the mean difference over seeds, with its 95 % interval by Student's t."""
    seeds = sorted(own.keys() & other.keys())
    if len(seeds) < 2:
        return None
    gains = [own[seed][key] - other[seed][key] for seed in seeds]
    half = stats.t.ppf(0.975, len(gains) - 1) * stdev(gains) / len(gains) ** 0.5
    return fmean(gains), fmean(gains) - half, fmean(gains) + half


def print_summary(records: Sequence[dict[str, Any]]) -> None:
    """Print a table for each case."""
    found = judged(records)
    means: dict[str, dict[str, float]] = defaultdict(dict)
    for case in CASES:
        arms = [arm for one, arm in found if one == case]
        if not arms:
            continue
        rows = []
        for arm in arms:
            runs = found[case, arm]
            best, tried = tuned_rate(records, case, arm)
            gain = difference(runs, found.get((case, BASELINE), {})) if arm != BASELINE else None
            if gain is not None:
                means[arm][case] = gain[0]
            scores = [run["score"] for run in runs.values()]
            at_edge = " (edge)" if best in (tried[0], tried[-1]) else ""
            rows.append(
                (
                    arm,
                    len(runs),
                    f"{fmean(run['parameters'] for run in runs.values()):,.0f}",
                    f"{best:g}{at_edge}",
                    f"{fmean(scores):.2f}",
                    f"{fmean(run['loss'] for run in runs.values()):.4f}",
                    "" if gain is None else f"{gain[0]:+.2f} [{gain[1]:+.2f}, {gain[2]:+.2f}]",
                    f"{fmean(run['seconds'] for run in runs.values()):.0f}",
                )
            )
        before = next(record["before"] for record in records if record["case"] == case)
        print(f"\n{case} (test score; {before:.2f} before adapting)\n")
        head = ("arm", "seeds", "parameters", "rate", "score", "loss", "against peft", "seconds")
        print_table(head, rows)
    if means:
        print("\nmean difference to peft over cases, in points\n")
        print_table(
            ("arm", "cases", "mean", "by case"),
            [
                (
                    arm,
                    len(own),
                    f"{fmean(own.values()):+.2f}",
                    ", ".join(f"{case} {value:+.2f}" for case, value in own.items()),
                )
                for arm, own in means.items()
            ],
        )
