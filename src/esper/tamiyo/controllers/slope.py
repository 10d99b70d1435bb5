"""The rule `slope`: double the depth of a stage when that lowers the loss more per FLOP.

The rule grows copies of blocks alone (`kin`). It expects a doubled network to learn as fast per
step as this one did just after its last growth. So it doubles once the fall of the loss per FLOP,
now over then, is below the cost of a step now over that of a step after doubling. The same rule
wakes the blocks of `Deepen` (`esper.growth.depth.rules.Slope`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext, shortened
from esper.leyline.errors import UsageError
from esper.leyline.reasons import Why, describe_progress
from esper.leyline.stages import COOLDOWN_STAGES, LIVE_STAGES, SeedStage
from esper.tamiyo.controllers.registry import (
    WAIT,
    RowController,
    RowView,
    Verdict,
    advance_seeds,
    describe_resting,
    describe_waiting,
    first_untried,
    read_settings,
    register_controller,
)

# ---- What a FLOP buys

LATEST = 0.6
"""Share of a run after which nothing is doubled any more."""


@dataclass(frozen=True, slots=True)
class Falls:
    """Falls of the loss per FLOP since the last growth."""

    first: float
    """Just after it."""
    now: float

    def is_below(self, share: float) -> bool:
        """Return whether a FLOP buys less than this share of what it bought at first."""
        return self.now <= share * max(self.first, 0.0)


def find_falls(curve: Sequence[Sequence[float]], windows: int) -> Falls | None:
    """Return what a FLOP bought at first and now; None if the curve is too short.

    Args:
        curve: (FLOPs spent, mean loss) of every window since the last growth, oldest first.
        windows: number of windows in each of the means that are compared.
    """
    if len(curve) < 3 * windows:
        return None
    return Falls(_fall(curve[: 2 * windows]), _fall(curve[-2 * windows :]))


def _fall(curve: Sequence[Sequence[float]]) -> float:
    """Return the fall of the loss per FLOP between the halves of a curve."""
    half = len(curve) // 2
    (before, high), (after, low) = (
        (fmean(flops for flops, _ in part), fmean(loss for _, loss in part))
        for part in (curve[:half], curve[half:])
    )
    return (high - low) / (after - before)


# ---- The controller


@dataclass(frozen=True, kw_only=True)
class SlopeConfig(Config):
    """The constants of the rule."""

    windows: int = option(
        2,
        "Epochs in each of the means of the loss that are compared; the rule decides from three "
        "times as many after its last growth. Meant for runs of 60 epochs or more.",
        minimum=1,
    )
    margin: float = option(
        1.0,
        "Factor on the ratio of costs below which the falls of the loss must be: above 1 doubles "
        "earlier, below 1 later.",
        above=0.0,
    )
    loss: Literal["validation", "training"] = option(
        "validation",
        "Which loss is watched. The training loss also falls where wrong labels are learned by "
        "heart.",
    )
    rising: bool = option(False, "Whether to double while that loss rises.")
    order: Literal["even", "cheap"] = option(
        "even",
        "Which stage is doubled first: the one with the fewest copies (even), or the one whose "
        "next block costs the fewest operations (cheap); of equals the cheapest, or shallowest.",
    )
    latest: float = option(
        LATEST, "Share of the run after which nothing is doubled any more.", minimum=0.0
    )
    doublings: int = option(0, "Most doublings, over all stages; 0 is no limit.", minimum=0)


@dataclass(slots=True)
class _Memory:
    """The memory of one row."""

    curve: list[list[float]] = field(default_factory=list)
    """[FLOPs or epochs spent, loss] of every epoch since the number of copies changed."""
    copies: int = 0
    """Copies in the network then."""
    tried: list[int] = field(default_factory=list)
    """[op, slot] of the last attempt to keep a seed."""


@register_controller("slope")
class SlopeController(RowController[_Memory]):
    """Doubles the depth of one stage after the other, each when it pays."""

    memory = _Memory

    def __init__(self, context: ControllerContext, config: SlopeConfig | None = None) -> None:
        super().__init__()
        self.config = config or SlopeConfig()
        known = [name for name in context.copies if name in context.blueprint_names]
        if not known:
            raise UsageError(
                "the controller 'slope' grows copies of blocks (kin), which these networks cannot "
                "grow; where rows are played or trained, allow them: population.copies=true"
            )
        self._copy = context.blueprint_names.index(known[0])

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> SlopeController:
        """Return the controller; `argument` may set constants, as in 'windows=4,latest=0.5'."""
        return cls(context, read_settings("slope", argument, SlopeConfig))

    def decide(self, row: RowView, memory: _Memory) -> Verdict:
        """Double a stage if that pays; at the end keep what has grown."""
        config = self.config
        self._note(row, memory)
        late = row.epoch > config.latest * row.horizon
        done = sum(round(math.log2(1 + copies)) for copies in row.copies)
        progress = describe_progress(row.loss_history, row.epoch, row.horizon)
        if late:
            return self._keep(row, memory, f"{Why.TOO_LATE} ({progress})")
        if config.doublings and done >= config.doublings:
            return self._keep(row, memory, f"{Why.FULL} (this rule doubles {done} times)")
        young = (SeedStage.GERMINATED, SeedStage.TRAINING)
        learning = [slot for slot, stage in enumerate(row.stage) if stage in young]
        if learning:
            # Only where copies do not enter at full amplitude.
            choice = next(iter(advance_seeds(row, learning)), WAIT)
            return choice, "" if choice is not WAIT else describe_waiting(row, learning[0])
        if any(stage in COOLDOWN_STAGES for stage in row.stage):
            return WAIT, describe_resting(row)
        wanted = 3 * self._windows(row)
        falls = find_falls(memory.curve, self._windows(row))
        if falls is None:
            return WAIT, f"{Why.EARLY} ({len(memory.curve)} of {wanted} epochs at this depth)"
        slot = self._choose(row)
        if slot is None:
            slots = len(row.stage)
            if all(flops[self._copy] < 0 for flops in row.seed_flops):
                return WAIT, f"{Why.NO_COPY} (0 of {slots} slots follow one with a residual path)"
            return self._keep(row, memory, f"{Why.FULL} (0 of {slots})")
        why = self._why_not(row, slot, falls)
        if why:
            return WAIT, f"{why}, {progress})"
        return {"op": LifecycleOp.GERMINATE, "slot": slot, "blueprint": self._copy}, ""

    def _windows(self, row: RowView) -> int:
        return shortened(self.config.windows, row.horizon)

    def _note(self, row: RowView, memory: _Memory) -> None:
        """Remember the loss of the epoch; forget those of another depth."""
        copies = sum(row.copies)
        if copies != memory.copies:
            memory.copies = copies
            memory.curve.clear()
        loss = row.loss_history[-1] if self.config.loss == "validation" else row.train_loss
        # Epochs of one network without a budget cost the same, so that they can stand for FLOPs.
        spent = float(row.epoch if row.compute_budget < 0 else row.compute_spent)
        is_later = not memory.curve or spent > memory.curve[-1][0]
        if math.isfinite(loss) and is_later:
            memory.curve.append([spent, loss])

    def _choose(self, row: RowView) -> int | None:
        """Return the slot whose stage is doubled next; None if no stage can be.

        By default it is the shallowest stage: a doubling then multiplies the depth of a stage by
        the same factor everywhere, and no stage gets eight blocks while another has one. The
        cheapest would always be the same stage where a doubled one costs no more than its share.
        """
        slots = [
            slot
            for slot in range(len(row.stage))
            if row.legal[LifecycleOp.GERMINATE][slot] and row.fits[slot][self._copy]
        ]

        def cost(slot: int) -> float:
            return row.seed_flops[slot][self._copy] / (1 + row.copies[slot])

        def order(slot: int) -> tuple[float, float, int]:
            if self.config.order == "cheap":
                return cost(slot), row.copies[slot], slot
            return row.copies[slot], cost(slot), slot

        return min(slots, key=order, default=None)

    def _why_not(self, row: RowView, slot: int, falls: Falls) -> str:
        """Return why doubling would not pay, up to its last figures; empty if it would."""
        if falls.now < 0 and not self.config.rising:
            return f"{Why.RISING} (a FLOP raised the {self.config.loss} loss"
        # Operations that cannot be counted are 0; a doubled network costs at most twice as much.
        added = row.seed_flops[slot][self._copy]
        factor = 1 + added / row.flops if row.flops > 0 and added >= 0 else 2.0
        if falls.is_below(self.config.margin / factor):
            return ""
        bought = f"{falls.now / falls.first:.0%}" if falls.first > 0 else "more than 100%"
        return (
            f"{Why.STEEP} (a FLOP bought {bought} of what it bought at first, and a step after "
            f"doubling costs {factor:.2f} times as much"
        )

    def _keep(self, row: RowView, memory: _Memory, why: str) -> Verdict:
        """Fossilize what has grown: it is not ablated any more, which saves compute."""
        live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
        options = advance_seeds(row, live)
        tried = memory.tried
        has_failed = bool(tried) and row.last_op == tried[0] and not row.last_success
        failed = {"op": tried[0], "slot": tried[1]} if has_failed else None
        choice = first_untried(options, failed)
        if choice is None:
            return WAIT, why
        memory.tried = [int(choice["op"]), int(choice["slot"])]
        return choice, ""
