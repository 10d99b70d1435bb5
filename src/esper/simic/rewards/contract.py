"""The protocol of rewards, their registry, and the memory and view that terms work on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from esper.leyline.actions import Actions, LifecycleOp, TensorRecord
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.registry import Registry
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, MODULE_STAGES

if TYPE_CHECKING:
    from esper.simic.rewards.modes import RewardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One step of R rows: signals before, actions, signals after."""

    before: Signals
    """Signals the decision was made on."""
    actions: Actions
    """{head: int64 [R]}, as sampled."""
    after: Signals
    """Signals after the epoch that followed."""
    twin_before: Tensor
    """float32 [R], the twin's score at `before.epoch`; NaN without a twin."""
    twin_after: Tensor
    """float32 [R], the twin's score at `after.epoch`; NaN without a twin."""
    is_last: Tensor
    """bool [R], the horizon is reached: no decision follows."""
    active: Tensor
    """bool [R], the row's episode was still running; other rows get a reward of exactly 0."""

    @property
    def op(self) -> Tensor:
        """int64 [R], the op that was asked for."""
        return self.actions["op"]

    @property
    def effective_op(self) -> Tensor:
        """int64 [R], the op that took effect: WAIT where it was refused or a gate failed."""
        return torch.where(self.after.last_success, self.op, int(LifecycleOp.WAIT))

    @property
    def ended(self) -> Tensor:
        """Bool [R], the episode is over after this step, by its horizon or by a rollback."""
        return self.active & (self.is_last | self.after.rolled_back)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStep:
    """The reward of one step; tensors float32 [R]."""

    terms: Mapping[str, Tensor]
    """Every term by name, the same names in every step, 0 where nothing is paid. They are recorded
    and reported under these names."""
    potential: Tensor | None = None
    """float32 [R], the potential after the step.

    A reward that pays the change of a potential, gamma * now - before, returns the new potential
    here. The critic then only has to predict what is still to come.
    """
    details: Mapping[str, Tensor] = field(default_factory=dict)
    """Unpaid details by name, the same names in every step, NaN where there is no value. They are
    recorded beside the terms of each decision."""

    @property
    def total(self) -> Tensor:
        """float32 [R], the reward: the sum of its terms."""
        return torch.stack(list(self.terms.values())).sum(0)


class Reward(Protocol):
    """Computes the rewards of rows."""

    needs_twin: bool
    """Whether scores of twins are required."""

    def reset(self, signals: Signals) -> None:
        """Clear the memory; an episode starts in every row with these signals."""

    def step(self, transition: Transition) -> RewardStep:
        """Return the reward of the step, and update the memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain data and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


RewardFactory = Callable[[Any], Reward]
"""Builds a reward from a `RewardConfig`."""

REWARDS: Registry[RewardFactory] = Registry("reward")
"""Rewards by the name of their mode."""


F = TypeVar("F", bound=RewardFactory)

_METHODS = ("reset", "step", "state_dict", "load_state_dict")


def register_reward(name: str) -> Callable[[F], F]:
    """Register the decorated class or function as the mode `name`.

    It is called with a `RewardConfig` and returns a `Reward`.
    """

    def decorate(factory: F) -> F:
        if not callable(factory):
            raise UsageError(
                f"reward {name!r} must be a class or a function that takes a RewardConfig, "
                f"got {factory!r}"
            )
        if isinstance(factory, type):
            missing = [m for m in _METHODS if not callable(getattr(factory, m, None))]
            if missing:
                raise UsageError(
                    f"reward {name!r} must have the methods {', '.join(_METHODS)}; "
                    f"missing {', '.join(missing)}"
                )
        REWARDS.register(name, factory)
        return factory

    return decorate


def make_reward(config: RewardConfig) -> Reward:
    """Return the reward of the configured mode; call its `reset` before the first step."""
    return REWARDS.get(config.mode)(config)


# ---- The memory of a reward, and the view of a step that its terms get


NO_SLOT = -1
FINAL_EPOCHS = 5  # Last epochs whose mean is the final gain over the twin.
CONTRIBUTING_IMPROVEMENT = 1.0  # Improvement at fossilization of a contributing fossil.
Changes = dict[str, Tensor]
"""New values of some fields of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(TensorRecord):
    """The memory of R rows with S slots over episodes of up to L epochs."""

    score_before: Tensor
    """float32 [R, S], score before the germination; NaN if unknown."""
    score_first: Tensor
    """float32 [R, S], first score with the seed in place; NaN where there is none."""
    attribution_paid: Tensor
    """float32 [R, S], sum of the seed's attributions so far."""
    balance: Tensor
    """float32 [R, S], credit in escrow."""
    fossil_contributes: Tensor
    """bool [R, S], fossilized with a real improvement and no harm."""
    boosts: Tensor
    """float32 [R, S, S, L + 1], points that a scaffold gave a beneficiary at an epoch."""
    pending: Tensor
    """float32 [R], hindsight credit to be paid at the next step."""
    has_parted: Tensor
    """bool [R], a seed was blended: the row is no longer identical to its twin."""
    first_slot: Tensor
    """int64 [R], slot of the seed whose first-germination bonus may be taken back, or -1."""
    gain: Tensor
    """float32 [R], gain over the twin that was paid last, in points."""
    recent_gains: Tensor
    """float32 [R, N], gains of the last epochs, newest last, NaN before the first."""
    germinated: Tensor
    """int64 [R], seeds germinated so far."""
    fossilized: Tensor
    """int64 [R], seeds fossilized so far."""
    removed: Tensor
    """int64 [R], seeds removed so far, by controller or governor."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.gain.device

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Memory:
        """Rebuild what `state_dict` returned."""
        names = {field.name for field in dataclasses.fields(cls)}
        if names != state.keys():
            raise CheckpointError(
                "the saved memory of the reward is of another version: it lacks "
                f"{', '.join(sorted(names - state.keys())) or 'nothing'} and also has "
                f"{', '.join(sorted(state.keys() - names)) or 'nothing'}"
            )
        return cls(**state)


def start_memory(signals: Signals, *, keeps_boosts: bool) -> Memory:
    """Return the memory of episodes that start with these signals."""
    rows, slots, device = signals.rows, signals.num_slots, signals.stage.device
    epochs = int(signals.max_epochs.max()) + 1 if keeps_boosts else 0

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((rows, *shape), dtype=dtype, device=device)

    present = is_in(signals.stage, MODULE_STAGES)
    score = signals.val_score[:, None].expand(rows, slots)
    recent = torch.full((rows, FINAL_EPOCHS), math.nan, device=device)
    recent[:, -1] = 0.0
    return Memory(
        score_before=torch.full((rows, slots), math.nan, device=device),
        score_first=torch.where(present, score, math.nan),
        attribution_paid=zeros(slots),
        balance=zeros(slots),
        fossil_contributes=zeros(slots, dtype=torch.bool),
        boosts=zeros(slots, slots, epochs),
        pending=zeros(),
        has_parted=zeros(dtype=torch.bool),
        first_slot=torch.full((rows,), NO_SLOT, dtype=torch.int64, device=device),
        gain=zeros(),
        recent_gains=recent,
        germinated=zeros(dtype=torch.int64),
        fossilized=zeros(dtype=torch.int64),
        removed=zeros(dtype=torch.int64),
    )


def follow_seeds(view: StepView) -> Changes:
    """Return the memory that every mode has of seeds: their first scores, and counts."""
    memory, before, after = view.memory, view.before, view.after
    new = view.has_module & ~view.had_module
    kept = view.has_module & view.had_module
    first = torch.where(new, after.val_score[:, None], memory.score_first)
    start = torch.where(new, before.val_score[:, None], memory.score_before)
    fossilize = view.did(LifecycleOp.FOSSILIZE)
    # The contribution must be known and not negative.
    helped = (view.improvement >= CONTRIBUTING_IMPROVEMENT) & (view.contribution >= 0)
    contributes = fossilize & helped
    removed = view.had_module & ~view.has_module
    return {
        "score_before": torch.where(view.has_module, start, math.nan),
        "score_first": torch.where(view.has_module, first, math.nan),
        "fossil_contributes": (memory.fossil_contributes & kept) | contributes,
        "has_parted": memory.has_parted | after.has_effective_seed,
        "germinated": memory.germinated + view.did(LifecycleOp.GERMINATE).any(1),
        "fossilized": memory.fossilized + fossilize.any(1),
        "removed": memory.removed + removed.sum(1),
    }


T = TypeVar("T")


class StepView:
    """A transition with the memory from before it, as terms see it."""

    def __init__(self, transition: Transition, memory: Memory, config: RewardConfig) -> None:
        """Wrap one step; properties are computed on demand."""
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
        """Bool [R, S], a live seed before the step."""
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
