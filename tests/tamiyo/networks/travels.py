"""Travelling policies and situations for the tests of the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_KINDS, BlueprintKind
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.networks.travelling import TravellingActorCritic
from esper.tamiyo.policy.observation import TravellingLayout
from esper.testing.controllers import random_signals
from tests.tamiyo.networks.situations import Rollout


def travelling(
    slots: int = 3, kinds: tuple[BlueprintKind, ...] = BUILTIN_KINDS, **options: Any
) -> TravellingActorCritic:
    """Return a small policy whose heads are far from uniform; equal options give equal weights."""
    settings: dict[str, Any] = {"lstm_hidden_dim": 32, "slot_width": 16, "policy_gain": 1.0}
    config = PolicyConfig(
        layout="travelling",
        num_slots=slots,
        num_blueprints=len(kinds),
        **{**settings, **options},
    )
    torch.manual_seed(0)
    return TravellingActorCritic(config, kinds)


def with_slots(net: TravellingActorCritic, slots: int) -> TravellingActorCritic:
    """Return the same weights for another number of slots."""
    other = TravellingActorCritic(net.config.replace(num_slots=slots), BUILTIN_KINDS)
    other.load_state_dict(net.state_dict())
    return other


def situation(rows: int, slots: int = 3, seed: int = 0) -> tuple[Signals, Masks]:
    return random_signals(rows, slots, torch.Generator().manual_seed(seed))


def see(net: TravellingActorCritic, signals: Signals) -> tuple[Tensor, Tensor]:
    """Return what the policy is shown, not standardised."""
    return net.config.observation.observe(signals)


def act(net: TravellingActorCritic, rows: int = 6, steps: int = 12, **options: Any) -> Rollout:
    """Let the policy act one step at a time on random situations."""
    hidden = net.initial_hidden(rows)
    taken: list[PolicyStep] = []
    states, blueprints = [], []
    for at in range(steps):
        signals, masks = situation(rows, net.config.num_slots, at)
        state, indices = see(net, signals)
        step = net.get_action(state, masks, indices, hidden, **options)
        hidden = step.hidden
        taken.append(step)
        states.append(state)
        blueprints.append(indices)

    def stack(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in taken], 1)

    return Rollout(
        states=torch.stack(states, 1),
        blueprints=torch.stack(blueprints, 1),
        actions=stack("actions"),
        masks=stack("masks"),
        log_probs=stack("log_probs"),
        values=stack("value"),
        hidden=hidden,
    )


_BY_SLOT = 2
"""Axes of a signal about slots."""


def shuffled_slots(signals: Signals, order: list[int], masks: Masks) -> tuple[Signals, Masks]:
    """Return signals and masks whose slots come in another order, or are padded where it is -1."""
    slots = signals.num_slots
    places = torch.tensor([slots if place < 0 else place for place in order])

    def pick(tensor: Tensor, axis: int, absent: float) -> Tensor:
        pad = [0, 0] * (tensor.dim() - axis - 1) + [0, 1]
        return F.pad(tensor, pad, value=absent).index_select(axis, places)

    absent = {"stage": -1, "blueprint": -1, "alpha_mode": -1, "algorithm": -1, "age": -1}
    absent |= {"epochs_in_stage": -1, "counterfactual_age": -1, "slot_topology": -1}
    absent |= {"seed_params": -1, "seed_flops": -1}
    unmeasured = ("contribution", "contribution_se", "contribution_velocity")
    changes = {}
    for name in signals.__slots__:
        value = getattr(signals, name)
        if value.dim() < _BY_SLOT or value.shape[1] != slots or "history" in name:
            continue
        empty = float("nan") if name in unmeasured else absent.get(name, 0)
        changes[name] = pick(value, 1, empty)
    changes["interaction"] = pick(changes["interaction"], 2, 0.0)
    return replace(signals, **changes), replace(
        masks,
        slot_by_op=pick(masks.slot_by_op, 2, 0),
        blueprint_by_slot=pick(masks.blueprint_by_slot, 1, 0),
    )


LAYOUT = TravellingLayout(3, len(BUILTIN_KINDS))
