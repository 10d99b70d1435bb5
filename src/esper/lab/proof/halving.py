"""Successive halving over static depths, at the compute of one run in total.

A member has a budget B. Three networks, of depth 1, 2 and 4 from the start, have a run of 2/3 B
each, with the learning-rate schedule of such a run. All three train to about a ninth of B, the
better two to about two ninths, and the best one to the end: 1/9 + 2/9 + 2/3 = 1. So B is spent, and
the network that counts was trained with two thirds of it.

All three runs are played to the end, and what would have been stopped is decided afterwards from
their validation curves. `training_flops` has only what would have been spent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from esper.lab.proof.arm import HALVING, DepthArm
from esper.lab.proof.results import CellResult
from esper.lab.tasks.member import AnyMember
from esper.leyline.errors import UsageError

DEPTHS = (1, 2, 4)
"""Depths that begin."""
SHARE = 2 / 3
"""Share of the member's budget that a whole run has."""
LEAST_EPOCHS = 8
"""Shortest run in which the first decision comes after an epoch."""


def decision_epochs(epochs: int) -> tuple[int, int]:
    """Return after how many epochs of a run two networks are left, and after how many one.

    These are the whole epochs nearest to a sixth and a third of the run for which the epochs of all
    three networks are one and a half runs together, so that B is spent. (If the run has an odd
    number of epochs, half an epoch is left over.)
    """
    first = epochs // 6
    return first, epochs // 2 - first


def halve(curves: Sequence[Sequence[float]]) -> tuple[int, list[int]]:
    """Return the number of the network that is left, and the epochs that each one trains.

    At each decision the one with the lowest validation score so far is stopped; of equals the last.

    Args:
        curves: validation score after every epoch of whole runs, for each of the networks.
    """
    epochs = len(curves[0])
    trained = [epochs] * len(curves)
    left = list(range(len(curves)))
    for stop in decision_epochs(epochs):
        ranked = sorted(left, key=lambda number: -_best(curves[number][:stop]))
        trained[ranked[-1]] = stop
        left = sorted(ranked[:-1])
    (best,) = left
    return best, trained


def _best(scores: Sequence[float]) -> float:
    """Return the highest score; one that is not a number counts least."""
    return max(-math.inf if math.isnan(score) else score for score in scores)


def combine(runs: Sequence[CellResult], arm: str) -> CellResult:
    """Return the result of halving on a member.

    Args:
        runs: results of the whole runs of all depths, with the same seeds.
        arm: name of the arm.
    """
    first = runs[0]
    assert all(run.seeds == first.seeds for run in runs), "networks of a seed are compared"
    halved = [halve(curves) for curves in zip(*(run.curves for run in runs), strict=True)]
    picked: dict[str, Any] = {
        field.name: [getattr(runs[best], field.name)[seed] for seed, (best, _) in enumerate(halved)]
        for field in dataclasses.fields(CellResult)
        if isinstance(getattr(first, field.name), list)
    }
    spent = [
        sum(
            run.training_flops[seed] * epochs / len(run.curves[seed])
            for run, epochs in zip(runs, trained, strict=True)
        )
        for seed, (_, trained) in enumerate(halved)
    ]
    return dataclasses.replace(
        first, **{**picked, "purpose": "proof", "arm": arm, "training_flops": spent}
    )


def halving_arms(members: Sequence[AnyMember], horizon: int = 0) -> list[DepthArm]:
    """Return the arms whose whole runs are played.

    Args:
        members: members of the proof.
        horizon: epochs of every run; 0 is the member's own.

    Raises:
        UsageError: A member has no budget, or too few epochs.
    """
    for member in members:
        config = member.task().config
        epochs = horizon or config.horizon
        if epochs < LEAST_EPOCHS:
            raise UsageError(
                f"arm {HALVING!r} needs runs of {LEAST_EPOCHS} epochs or more, and "
                f"{member.label!r} has {epochs}; leave out the arm, or make the runs longer"
            )
        if config.budget is None:
            raise UsageError(
                f"arm {HALVING!r} divides a budget of compute, and {member.label!r} has none; "
                "leave out the arm, or choose a family with budgets, such as depth_family"
            )
    return [_arm(depth) for depth in DEPTHS]


def _arm(depth: int) -> DepthArm:
    return DepthArm(f"{HALVING}, depth {depth}", lambda member: depth, share=SHARE)
