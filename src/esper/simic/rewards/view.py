"""One step as the terms of a reward see it: what was done to which seed, and how seeds stood.

Terms about the operation read the signals before it, terms about what is in use or gained read
those after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, MODULE_STAGES
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import Transition
from esper.simic.rewards.memory import Memory

T = TypeVar("T")


class StepView:
    """A transition together with what the reward remembers from before it."""

    def __init__(self, transition: Transition, memory: Memory, config: RewardConfig) -> None:
        """Look at one step; nothing is computed before it is asked for."""
        self.transition, self.memory, self.config = transition, memory, config
        self._known: dict[Callable[[StepView], Any], Any] = {}

    def once(self, compute: Callable[[StepView], T]) -> T:
        """Return `compute(self)`, computed at most once per step."""
        if compute not in self._known:
            self._known[compute] = compute(self)
        known: T = self._known[compute]
        return known

    @property
    def before(self) -> Signals:
        """Signals the decision was made on."""
        return self.transition.before

    @property
    def after(self) -> Signals:
        """Signals after the epoch that followed."""
        return self.transition.after

    @cached_property
    def op(self) -> Tensor:
        """int64 [R], the op that took effect; WAIT where it was refused."""
        return self.transition.effective_op

    @cached_property
    def ended(self) -> Tensor:
        """Bool [R], the episode is over after this step."""
        return self.transition.ended

    @cached_property
    def rolled_back(self) -> Tensor:
        """Bool [R], the governor ended the episode."""
        return self.transition.active & self.after.rolled_back

    @cached_property
    def at_slot(self) -> Tensor:
        """Bool [R, S], the slot the action named, whatever the op."""
        slots = torch.arange(self.before.num_slots, device=self.op.device)
        return self.transition.actions["slot"][:, None] == slots

    def did(self, op: LifecycleOp) -> Tensor:
        """Return bool [R, S]: where this op took effect."""
        return self.at_slot & (self.op == int(op))[:, None]

    @cached_property
    def live(self) -> Tensor:
        """Bool [R, S], a seed whose fate was open when the decision was made."""
        return is_in(self.before.stage, LIVE_STAGES)

    @cached_property
    def had_module(self) -> Tensor:
        """Bool [R, S], a live or fossilized seed was there before the step."""
        return is_in(self.before.stage, MODULE_STAGES)

    @cached_property
    def has_module(self) -> Tensor:
        """Bool [R, S], a live or fossilized seed is there after the step."""
        return is_in(self.after.stage, MODULE_STAGES)

    @property
    def contribution(self) -> Tensor:
        """float32 [R, S], points lost without the seed, NaN where never measured."""
        return self.before.contribution

    @cached_property
    def improvement(self) -> Tensor:
        """float32 [R, S], score before the step minus the first with the seed; NaN without one."""
        return self.before.val_score[:, None] - self.memory.score_first

    @cached_property
    def progress(self) -> Tensor:
        """float32 [R, S], score before the step minus that before the seed; NaN where unknown."""
        return self.before.val_score[:, None] - self.memory.score_before

    @cached_property
    def last_change(self) -> Tensor:
        """float32 [R], change of the score in the epoch before the decision, 0 in the first."""
        history = self.before.score_history
        return (history[:, -1] - history[:, -2]).nan_to_num(0.0)

    def mean_over_live(self, values: Tensor) -> Tensor:
        """Return float32 [R]: the mean of [R, S] values over the live seeds, 0 without any."""
        count = self.live.sum(1).clamp(min=1)
        return torch.where(self.live, values, 0.0).sum(1) / count
