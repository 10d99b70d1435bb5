"""Rules that decide when to deepen: a schedule, or what the training loss says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from esper.leyline.errors import UsageError, unknown_name

LAST_DOUBLING = 0.4
"""Share of the run at which the default schedule wakes the last blocks (docs/log.md)."""
LATEST = 0.6
"""Share of the run by which rules that judge by the loss have woken all blocks."""
Decision = int | Mapping[str, int] | None
"""Blocks to be awake, in every stack or by stack; None changes nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a controller of depth sees after an optimizer step."""

    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """Optimizer steps of the whole run, where that is known."""
    awake: Mapping[str, int]
    """Blocks awake, by stack."""
    blocks: Mapping[str, int]
    """All blocks, by stack."""
    doubled: Mapping[str, int]
    """Blocks awake after the next doubling, by stack; the same as `awake` once all are."""
    flops: float
    """Training FLOPs spent so far."""
    flops_per_step: float
    """Training FLOPs of a step with the blocks awake now."""
    flops_per_step_doubled: float
    """Training FLOPs of a step after the next doubling."""
    losses: Sequence[tuple[float, float]]
    """(FLOPs spent, mean training loss) of every window of 1 % of the run, oldest first."""
    windows_since_growth: int
    """How many of them were trained with the blocks awake now."""


@runtime_checkable
class DepthController(Protocol):
    """Decides after every optimizer step how many blocks are to be awake.

    `state_dict()` and `load_state_dict()` are called too, where a controller has them.
    """

    def __call__(self, progress: Progress) -> Decision:
        """Return the number of blocks to be awake, or None to go on as it is."""


class Schedule:
    """Wakes blocks at given steps; by default doubles them until all are awake.

    Doublings are spaced evenly, the last one at 40 % of the run: at 20 % and 40 % from a quarter.
    """

    def __init__(self, at: Mapping[int, Decision] | None = None) -> None:
        """Take {step: blocks}, or double."""
        for step in at or {}:
            if not isinstance(step, int) or isinstance(step, bool) or step < 1:
                raise UsageError(
                    f"at={{step: blocks}} counts steps from 1, got {step!r}; a share of the run is "
                    "int(share * total_steps)"
                )
        self.at = None if at is None else dict(sorted(at.items()))

    def moments(
        self,
        total_steps: int | None,
        awake: Mapping[str, int],
        double: Callable[[Mapping[str, int]], Mapping[str, int]],
    ) -> dict[int, Decision]:
        """Return {step: blocks} for a run that starts with these blocks awake."""
        if self.at is not None:
            return dict(self.at)
        if total_steps is None:
            raise UsageError(
                "say how long the run is, so that blocks wake in time: Deepen(..., total_steps=N), "
                "or when they do: at={step: blocks}"
            )
        stages = []
        while (deeper := double(awake)) != awake:
            stages.append(awake := deeper)
        return {
            max(1, round(LAST_DOUBLING * number / len(stages) * total_steps)): stage
            for number, stage in enumerate(stages, 1)
        }


class Plateau:
    """Doubles when the loss of the last windows is hardly below that of the windows before.

    Args:
        windows: number of windows, each 1 % of the run, that are compared with as many before.
        least: relative gain from the ones to the others below which blocks are woken.
    """

    def __init__(self, windows: int = 5, least: float = 0.01) -> None:
        """Choose how patient to be."""
        self._windows = windows
        self._least = least

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks on a plateau, and at the latest at 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        if progress.windows_since_growth < 2 * self._windows:
            return None
        losses = [loss for _, loss in progress.losses]
        after = fmean(losses[-self._windows :])
        before = fmean(losses[-2 * self._windows : -self._windows])
        return progress.doubled if before - after < self._least * abs(before) else None


class Slope:
    """Doubles when a FLOP buys so much less than it did that a deeper network's would buy more.

    What a FLOP buys is the fall of the loss over the FLOPs spent on it. A doubled network starts
    afresh, and its step costs more: so blocks are woken when a FLOP buys less of what it bought
    when these blocks were new than the share that a step costs now of a step then.

    Args:
        windows: number of windows, each 1 % of the run, over which a fall is measured.
    """

    def __init__(self, windows: int = 4) -> None:
        """Choose how patient to be."""
        self._windows = windows

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks when that pays, and at the latest at 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        since, each = progress.windows_since_growth, self._windows
        if since < 3 * each:
            return None
        own = progress.losses[-since:]
        new, now = self._bought(own[: 2 * each]), self._bought(own[-2 * each :])
        share = progress.flops_per_step / progress.flops_per_step_doubled
        return progress.doubled if now <= share * max(new, 0.0) else None

    def _bought(self, losses: Sequence[tuple[float, float]]) -> float:
        """Return the fall of the loss per FLOP from the first half of these windows to the last."""
        each = self._windows
        (before, high), (after, low) = (
            (fmean(flops for flops, _ in half), fmean(loss for _, loss in half))
            for half in (losses[:each], losses[each:])
        )
        return (high - low) / (after - before)


def _is_due(progress: Progress) -> bool:
    """Return whether blocks must wake now, so that all are awake at 60 % of the run."""
    assert progress.total_steps is not None
    doublings = max(
        math.ceil(math.log2(blocks / progress.awake[name]))
        for name, blocks in progress.blocks.items()
    )
    share = LATEST / 2.0 ** max(0, doublings - 1)
    return progress.step >= share * progress.total_steps


RULES: dict[str, Callable[[], Any]] = {"schedule": Schedule, "plateau": Plateau, "slope": Slope}


def make_rule(controller: str | DepthController, at: Mapping[int, Decision] | None) -> Any:
    """Return the rule of this name, or a controller of the caller's own."""
    if at is not None and controller != "schedule":
        raise UsageError("at= is for controller='schedule'; another controller decides by itself")
    if controller == "schedule":
        return Schedule(at)
    if isinstance(controller, str):
        if controller not in RULES:
            raise unknown_name("controller of depth", controller, RULES)
        return RULES[controller]()
    if not callable(controller):
        raise UsageError(
            "a controller of depth is called with the progress and returns the number of blocks to "
            f"be awake or None; got a {type(controller).__name__}"
        )
    return controller
