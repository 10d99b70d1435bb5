"""What a reward is: one shape for every mode, one registration, one way to build it by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from esper.leyline.actions import Actions, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry
from esper.leyline.signals import Signals

if TYPE_CHECKING:
    # The configuration is made of the constants of all terms, which import this.
    from esper.simic.rewards.config import RewardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One step of R rows: what was seen, what was done, what is seen now."""

    before: Signals
    """Signals the decision was made on."""
    actions: Actions
    """{head: int64 [R]}, as sampled."""
    after: Signals
    """Signals after the epoch that followed."""
    twin_before: Tensor
    """float32 [R], the waiting twin's score at `before.epoch`; NaN where no twin runs."""
    twin_after: Tensor
    """float32 [R], the waiting twin's score at `after.epoch`; NaN where no twin runs."""
    is_last: Tensor
    """bool [R], the horizon is reached: no decision follows."""
    active: Tensor
    """bool [R], the row's episode was still running; others get a reward of exactly 0."""

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
    """What one step paid; tensors float32 [R]."""

    terms: Mapping[str, Tensor]
    """Every term by name, the same ones in every step; 0 where there is nothing to pay. They are
    recorded, drawn and reported under these names, whatever they are."""
    potential: Tensor | None = None
    """float32 [R], after the step: what has been paid for and is taken back unless it lasts.

    A reward that pays the change of a potential, gamma * now - before, says here what it is now.
    The critic then has to foresee only what is still to come: the rest is known.
    """
    details: Mapping[str, Tensor] = field(default_factory=dict)
    """What explains the terms and is not paid, by name, the same ones in every step; NaN where
    there is nothing to say. They are recorded beside the terms of each decision."""

    @property
    def total(self) -> Tensor:
        """float32 [R]: the reward is always the sum of its terms."""
        return torch.stack(list(self.terms.values())).sum(0)


class Reward(Protocol):
    """One way to pay rows for what they do."""

    needs_twin: bool
    """Whether twin scores must be there."""

    def reset(self, signals: Signals) -> None:
        """Forget everything: an episode starts in every row with these first signals."""

    def step(self, transition: Transition) -> RewardStep:
        """Return what the step paid in every row, and remember what later steps need."""

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
    """Make the decorated class or function available as the mode `name`.

    It is called with a `RewardConfig` and gives a `Reward`.
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
    """Return the reward the configuration asks for; call its `reset` before the first step."""
    return REWARDS.get(config.mode)(config)
