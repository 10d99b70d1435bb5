"""Tables of the depth measurement: what each arm cost and reached, and its ECR.

ECR, the equal-loss compute ratio: training FLOPs that the static network of the same final depth
needs for the same loss, divided by the arm's own. The static curve is interpolated in log-log
between fully decayed runs that bracket the loss; nothing is extrapolated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from benchmarks.depth.cells import CELLS
from benchmarks.table import print_table

Record = dict[str, Any]
Curve = Sequence[tuple[float, float]]
"""(FLOPs, score) by rising FLOPs; lower scores are better."""


def score_of(record: Record) -> float:
    """Return what a run is judged by: the test error of images, the loss of text."""
    return float(record.get("error", record["loss"]))


def equal_loss_compute(curve: Curve, score: float) -> float | None:
    """Return the FLOPs at which the curve reaches the score; None where it does not bracket it."""
    for (near, high), (far, low) in pairwise(curve):
        if low <= score <= high and high > low:
            share = (math.log(high) - math.log(score)) / (math.log(high) - math.log(low))
            return math.exp(math.log(near) + share * (math.log(far) - math.log(near)))
    return None


@dataclass
class Arm:
    """Runs that differ in their seed alone."""

    key: tuple[Any, ...]
    records: list[Record]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def score(self) -> float:
        return fmean(score_of(record) for record in self.records)

    @property
    def flops(self) -> float:
        return fmean(record["flops"] for record in self.records)

    @property
    def is_static(self) -> bool:
        return len(self.first["plan"]) == 1

    @property
    def blocks(self) -> int:
        return int(self.first["plan"][-1][1])

    @property
    def label(self) -> str:
        words = self.first["name"].split(" ")
        return " ".join(words[1:-1])


def arms_of(records: Iterable[Record]) -> list[Arm]:
    """Group runs that differ in their seed alone."""
    grouped: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        cell, *words = record["name"].split(" ")
        grouped[cell, *words[:-1]].append(record)
    return [Arm(key, found) for key, found in grouped.items()]


def best_rates(arms: Sequence[Arm]) -> dict[tuple[int, str], float]:
    """Return each static depth's best rate where several were tried at one length."""
    best: dict[tuple[int, str], tuple[int, float, float]] = {}
    grouped = defaultdict(list)
    for arm in arms:
        if arm.is_static:
            grouped[arm.blocks, arm.first["schedule"], arm.first["steps"]].append(arm)
    for (blocks, schedule, _), tried in grouped.items():
        chosen = min(tried, key=lambda arm: arm.score)
        known = best.get((blocks, schedule))
        if known is None or len(tried) > known[0]:
            best[blocks, schedule] = (len(tried), chosen.first["rate"], chosen.score)
    return {key: rate for key, (_, rate, _) in best.items()}


def static_curve(arms: Sequence[Arm], blocks: int, schedule: str = "wsd") -> Curve:
    """Return a static depth's scores over compute at its best rate, means over seeds."""
    rate = best_rates(arms).get((blocks, schedule))
    return sorted(
        (arm.flops, arm.score)
        for arm in arms
        if arm.is_static
        and arm.blocks == blocks
        and arm.first["schedule"] == schedule
        and arm.first["rate"] == rate
    )


def print_summary(records: Sequence[Record]) -> None:
    """Print a table for each cell, arms by rising compute."""
    for name in CELLS:
        found = [record for record in records if record["cell"] == name]
        if not found:
            continue
        arms = arms_of(found)
        rows = []
        for arm in sorted(arms, key=lambda arm: (arm.flops, arm.score)):
            schedule = arm.first["schedule"]
            curve = static_curve(arms, arm.blocks, schedule)
            reached = None if arm.is_static else equal_loss_compute(curve, arm.score)
            spread = stdev(map(score_of, arm.records)) if len(arm.records) > 1 else None
            rows.append(
                (
                    arm.label,
                    len(arm.records),
                    f"{arm.flops:.3e}",
                    f"{arm.score:.4f}",
                    "" if spread is None else f"{spread:.4f}",
                    "" if reached is None else f"{reached / arm.flops:.2f}",
                    f"{fmean(record['seconds'] for record in arm.records):.0f}",
                )
            )
        print(f"\n{name} ({'test error' if 'error' in found[0] else 'validation loss'})\n")
        print_table(("arm", "seeds", "FLOPs", "score", "sd", "ECR", "seconds"), rows)
