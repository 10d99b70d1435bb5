"""The rule for networks that no controller has learned on: one seed at a time, on trial.

It needs no plateau and no knowledge of the network. The first seed is germinated early enough to
train with the network, in the slot nearest the middle. A seed is kept if the validation score would
fall without it, and pruned otherwise. In a frozen host only seeds can learn: there the first is
germinated at once, seeds that start as the identity come first and learn from the loss itself, any
gain is enough, and the number of seeds is not limited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext, shortened
from esper.leyline.reasons import Why, describe_progress, format_contribution
from esper.leyline.stages import COOLDOWN_STAGES, LIVE_STAGES, SeedStage
from esper.tamiyo.controllers.registry import (
    LOSS_POINTS,
    WAIT,
    Choice,
    RowController,
    RowView,
    Verdict,
    advance_seeds,
    describe_resting,
    describe_waiting,
    read_settings,
    register_controller,
    unit_of,
)


@dataclass(frozen=True, kw_only=True)
class TrialConfig(Config):
    """The constants of the rule; the measuring time is meant for runs of 60 epochs or more."""

    start: float = option(
        0.12,
        "Share of the run after which the first seed is germinated, but at once in a frozen host.",
        minimum=0.0,
    )
    stop: float = option(
        0.6, "Share of the run after which no seed is germinated any more.", minimum=0.0
    )
    seeds: int = option(2, "Most seeds that are kept in a host that trains.", minimum=1)
    blueprints: tuple[str, ...] = option(
        ("conv_heavy", "mlp", "conv_light", "mlp_small", "lora"),
        "What is put on trial: the first that fits the slot and was not pruned there.",
    )
    identities: tuple[str, ...] = option(
        ("bottleneck", "norm"),
        "What is put on trial first in a frozen host, where none of `blueprints` starts as the "
        "identity in the slot: such seeds are at full amplitude from their first step. Not in runs "
        "of `frozen_learning_epochs` or fewer.",
    )
    keep_above: float = option(0.5, "A seed that contributes more than these points is kept.")
    errors: float = option(
        2.0, "Standard errors by which its contribution must be above 0 as well.", minimum=0.0
    )
    learning_epochs: int = option(
        15,
        "Epochs a seed lives at least before it is pruned; one at full amplitude from its first "
        "step is measured earlier than it can learn.",
        minimum=0,
    )
    frozen_learning_epochs: int = option(
        15,
        "The same in a frozen host, where only seeds learn; short runs do not shorten it.",
        minimum=0,
    )
    measurement_epochs: int = option(
        10, "Epochs a holding seed waits for an ablation at full amplitude.", minimum=0
    )


@dataclass(slots=True)
class _Memory:
    """The memory of one row."""

    pruned: list[list[int]] = field(default_factory=list)
    """[slot, blueprint] of every seed that was not worth its place."""


@register_controller("trial")
class TrialController(RowController[_Memory]):
    """Germinates one seed at a time from the middle slot on, and keeps what contributes."""

    memory = _Memory

    def __init__(self, context: ControllerContext, config: TrialConfig | None = None) -> None:
        super().__init__()
        self.config = config or TrialConfig()
        self._blueprints = context.find_blueprints(self.config.blueprints)
        self._identities = context.find_blueprints(self.config.identities)
        self._context = context

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> TrialController:
        """Return the controller; `argument` may set constants, as in 'start=0.25,seeds=1'."""
        return cls(context, read_settings("trial", argument, TrialConfig))

    def decide(self, row: RowView, memory: _Memory) -> Verdict:
        """Judge a seed that holds, advance any other, or germinate."""
        is_frozen = row.host_params == 0
        live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
        if not live:
            return self._germinate(row, memory, is_frozen=is_frozen)
        slot = live[0]
        if row.stage[slot] == SeedStage.HOLDING:
            return self._judge(row, slot, memory, is_frozen=is_frozen)
        choice = next(iter(advance_seeds(row, [slot])), WAIT)
        return choice, "" if choice is not WAIT else describe_waiting(row, slot)

    def _germinate(self, row: RowView, memory: _Memory, *, is_frozen: bool) -> Verdict:
        """Put the first blueprint that fits on trial, in the free slot nearest the middle."""
        config = self.config
        kept = sum(stage == SeedStage.FOSSILIZED for stage in row.stage)
        left = row.horizon - row.epoch
        progress = describe_progress(row.loss_history, row.epoch, row.horizon)
        if not is_frozen and row.epoch < config.start * row.horizon:
            return WAIT, f"{Why.EARLY} ({progress})"
        if row.epoch > config.stop * row.horizon:
            return WAIT, f"{Why.TOO_LATE} ({progress})"
        if any(stage in COOLDOWN_STAGES for stage in row.stage):
            return WAIT, describe_resting(row)
        if kept >= config.seeds and not is_frozen:
            return WAIT, f"{Why.FULL} (this rule keeps {kept})"
        # A seed that starts as the identity starts slowly too, so a very short run does without.
        at_once = is_frozen and row.horizon > config.frozen_learning_epochs
        fitting = [
            (slot, blueprint)
            for slot in middle_first(len(row.stage))
            if row.legal[LifecycleOp.GERMINATE][slot]
            for blueprint in self._candidates(row, slot, at_once=at_once)
            if [slot, blueprint] not in memory.pruned
        ]
        if at_once:
            # A seed that has to be blended in learns without the loss at first: after all others.
            fitting.sort(key=lambda place: not self._context.is_immediate(*place))
        for slot, blueprint in fitting:
            if left > self._context.inert_epochs_of(slot, blueprint):
                return {"op": LifecycleOp.GERMINATE, "slot": slot, "blueprint": blueprint}, ""
        if fitting:
            return WAIT, f"{Why.TOO_LATE} ({progress})"
        return WAIT, f"{Why.FULL} (0 of {len(row.stage)})"

    def _candidates(self, row: RowView, slot: int, *, at_once: bool) -> list[int]:
        """Return the blueprints that fit a slot, in the order in which they are tried.

        Args:
            row: what the controller sees.
            slot: where.
            at_once: whether one should be at full amplitude from its first step.
        """
        fits, is_immediate = row.fits[slot], partial(self._context.is_immediate, slot)
        usual = [blueprint for blueprint in self._blueprints if fits[blueprint]]
        if not at_once or any(map(is_immediate, usual)):
            return usual
        identities = [blueprint for blueprint in self._identities if fits[blueprint]]
        return [*filter(is_immediate, identities), *usual]

    def _judge(self, row: RowView, slot: int, memory: _Memory, *, is_frozen: bool) -> Verdict:
        """Keep a holding seed if it contributes, else prune it."""
        config = self.config
        unit = 1.0 if row.score >= 0 else LOSS_POINTS / -row.score
        value, error = unit * row.contribution[slot], unit * row.contribution_se[slot]
        # An ablation older than the stage was made at a part of the amplitude and says too little.
        is_current = row.counterfactual_age[slot] <= row.epochs_in_stage[slot]
        is_measured = not math.isnan(value) and is_current
        if not is_measured:
            if row.epochs_in_stage[slot] < shortened(config.measurement_epochs, row.horizon):
                return WAIT, describe_waiting(row, slot)
            return self._prune(
                row,
                slot,
                memory,
                f"{Why.WORTHLESS} (not measured in {row.epochs_in_stage[slot]} epochs)",
            )
        least = max(0.0 if is_frozen else config.keep_above, config.errors * error)
        if value > least:
            choice: Choice = {"op": LifecycleOp.FOSSILIZE, "slot": slot}
            is_legal = row.legal[LifecycleOp.FOSSILIZE][slot]
            return (choice, "") if is_legal else (WAIT, describe_waiting(row, slot))
        learning = shortened(config.learning_epochs, row.horizon)
        if row.age[slot] < (config.frozen_learning_epochs if is_frozen else learning):
            return WAIT, describe_waiting(row, slot)
        worth = f"{format_contribution(value, error)} {unit_of(row.score)}"
        needed = f"more than {format_contribution(least)} is needed"
        return self._prune(row, slot, memory, f"{Why.WORTHLESS} ({worth}; {needed})")

    def _prune(self, row: RowView, slot: int, memory: _Memory, why: str) -> Verdict:
        """Remove a seed and do not try it there again; wait where that is illegal."""
        if not row.legal[LifecycleOp.PRUNE][slot]:
            return WAIT, describe_waiting(row, slot)
        memory.pruned.append([slot, row.blueprint[slot]])
        return {"op": LifecycleOp.PRUNE, "slot": slot}, why


def middle_first(slots: int) -> list[int]:
    """Return slot indices by their distance to the middle, of two equally far the earlier first."""
    return sorted(range(slots), key=lambda slot: (abs(slot - slots // 2), slot))
