"""Small policies and random situations for the tests of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.leyline.rules import Masks
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.layers import Hidden
from esper.testing.controllers import random_signals


def small_policy(**options: Any) -> FactoredRecurrentActorCriticV2:
    """Return a policy of width 32 whose heads are far from uniform."""
    settings: dict[str, Any] = {"lstm_hidden_dim": 32, "policy_gain": 1.0, **options}
    return FactoredRecurrentActorCriticV2(**settings)


def random_masks(rows: int, slots: int = 3, seed: int = 0) -> Masks:
    return random_signals(rows, slots, torch.Generator().manual_seed(seed))[1]


def random_inputs(policy: FactoredRecurrentActorCriticV2, *shape: int) -> tuple[Tensor, Tensor]:
    """Return observations [*shape, features] and blueprint indices [*shape, slots]."""
    config = policy.config
    states = torch.randn(*shape, config.observation_dim)
    return states, torch.randint(-1, config.num_blueprints, (*shape, config.num_slots))


@dataclass(frozen=True)
class Rollout:
    """Whole episodes, stacked over time as an update sees them."""

    states: Tensor
    blueprints: Tensor
    actions: Tensor
    masks: Tensor
    log_probs: Tensor
    values: Tensor
    hidden: Hidden

    def by_head(self) -> dict[str, Tensor]:
        return dict(zip(HEAD_NAMES, self.actions.unbind(-1), strict=True))


def act_step_by_step(
    policy: FactoredRecurrentActorCriticV2,
    rows: int = 4,
    steps: int = 20,
    *,
    starts: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Rollout:
    """Let the policy act one step at a time; where `starts` is True its memory is emptied."""
    states, blueprints = random_inputs(policy, rows, steps)
    hidden = policy.initial_hidden(rows)
    taken: list[PolicyStep] = []
    for at in range(steps):
        if starts is not None:
            keep = ~starts[:, at, None]
            hidden = (hidden[0] * keep, hidden[1] * keep)
        masks = random_masks(rows, policy.config.num_slots, seed + at)
        step = policy.get_action(
            states[:, at], masks, blueprint_indices=blueprints[:, at], hidden=hidden, **options
        )
        hidden = step.hidden
        taken.append(step)

    def stack(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in taken], 1)

    return Rollout(
        states=states,
        blueprints=blueprints,
        actions=stack("actions"),
        masks=stack("masks"),
        log_probs=stack("log_probs"),
        values=stack("value"),
        hidden=hidden,
    )


def forced_actions(op: LifecycleOp, *shape: int) -> dict[str, Tensor]:
    """Return actions {head: int64 [*shape]} that all take one op, with choices in every head."""
    actions = {head: torch.ones(shape, dtype=torch.int64) for head in HEAD_NAMES}
    actions["op"] = torch.full(shape, int(op))
    return actions
