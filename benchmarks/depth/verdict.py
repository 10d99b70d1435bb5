"""The depth measurement at a glance: for each cell its ECR by the default rule, and the front.

The front asks at equal compute: is a network grown to the best static depth better than that static
network? Arms count as equal where their training FLOPs differ by at most 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

from benchmarks.depth.cells import CELLS, Cell
from benchmarks.depth.summary import Arm, Record, arms_of, equal_loss_compute, static_curve
from benchmarks.table import print_table

_EQUAL = 0.02
AIMS = {"python-short": 1.3, "python-long": 1.3, "prose": 1.15, "ladder": 1.15, "small": 1.5}
AIMS |= {"vit": 1.1, "vit-plain": 1.1, "cnn": 1.1}
"""ECR of the default rule that each cell was to reach, fixed before anything was measured."""


@dataclass(frozen=True)
class Verdict:
    """What one cell shows."""

    cell: str
    ratio: float
    """ECR of the default rule; a lower bound where no static run is as good."""
    is_bound: bool
    default: Arm
    static: Arm
    """The best static arm at the compute of the default rule, of any depth and rate."""
    grown: Arm | None
    """The best arm grown to that depth at that compute."""


def is_default_rule(arm: Arm, cell: Cell) -> bool:
    """Return whether an arm is what `esper.Deepen` does by default with this cell's network."""
    usual = {"start": "state", "order": "stack", "schedule": "wsd", "rewarm": 0, "ramp": 0.0}
    first = arm.first
    return (
        tuple(map(tuple, first["plan"])) == cell.grown
        and first["rate"] == cell.rate
        and (first["length"], first["compute"]) in ((1.0, None), (1.0, 1.0))
        and all(first[key] == value for key, value in usual.items())
    )


def judge(records: Iterable[Record], cell: Cell) -> Verdict | None:
    """Return what a cell shows, None where the default rule or the static network is missing."""
    arms = arms_of(record for record in records if record["cell"] == cell.name)
    default = next((arm for arm in arms if is_default_rule(arm, cell)), None)
    curve = static_curve(arms, cell.depth)
    if default is None or not curve:
        return None
    reached = equal_loss_compute(curve, default.score)
    beside = [arm for arm in arms if abs(arm.flops / default.flops - 1) <= _EQUAL]
    statics = [arm for arm in beside if arm.is_static and arm.first["schedule"] == "wsd"]
    if not statics or (reached is None and default.score > min(score for _, score in curve)):
        return None
    best = min(statics, key=lambda arm: arm.score)
    grown = [
        arm
        for arm in beside
        if not arm.is_static
        and arm.blocks == best.blocks
        and (arm.first["start"], arm.first["order"]) == ("state", "stack")
        and arm.first["schedule"] == "wsd"
    ]
    return Verdict(
        cell=cell.name,
        ratio=(curve[-1][0] if reached is None else reached) / default.flops,
        is_bound=reached is None,
        default=default,
        static=best,
        grown=min(grown, key=lambda arm: arm.score, default=None),
    )


def geometric_mean(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the geometric mean and its interval by Student's t over the cells."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    low, high = stats.t.interval(confidence, len(logs) - 1, loc=mean, scale=stats.sem(logs))
    return math.exp(mean), math.exp(low), math.exp(high)


def print_verdicts(records: Sequence[Record]) -> None:
    """Print one row for each cell that can be judged, and the mean over them."""
    verdicts = [found for name in AIMS if (found := judge(records, CELLS[name]))]
    rows = []
    for each in verdicts:
        grown = each.grown
        rows.append(
            (
                each.cell,
                f"{'above ' * each.is_bound}{each.ratio:.2f}",
                f"{AIMS[each.cell]:.2f}",
                len(each.default.records),
                f"{each.static.blocks}: {each.static.score:.4f}",
                "" if grown is None else f"{_stages(grown)}: {grown.score:.4f}",
                "" if grown is None else f"{100 * (grown.score / each.static.score - 1):+.1f} %",
            )
        )
    print("\nECR of the default rule; front: grown to the best static depth at equal compute\n")
    head = ("cell", "ECR", "aim", "seeds", "best static depth", "grown to it", "difference")
    print_table(head, rows)
    if verdicts:
        mean, low, high = geometric_mean([each.ratio for each in verdicts])
        print(f"\ngeometric mean of {len(verdicts)} cells: {mean:.2f} [{low:.2f}, {high:.2f}]")


def _stages(arm: Arm) -> str:
    return "→".join(str(blocks) for _, blocks in arm.first["plan"])
