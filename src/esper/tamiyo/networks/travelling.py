"""The `travelling` policy: one set of weights for any number of slots and any blueprints.

    each slot, with the kind of its seed -> Linear, LayerNorm, ReLU, Linear, ReLU   (shared weights)
    host + mean and maximum over the slots -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm
        -> op, value
        -> slot: how well every slot goes with the memory, for every op
        -> blueprint: how well its kind and its cost go with the memory and the chosen slot
        -> style, tempo, alpha_target, alpha_speed, alpha_curve: memory and chosen slot

No weight depends on the number of slots or blueprints: a slot is described by its features, a
blueprint by its kind and its cost at a slot. A slot that a host does not have has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, NUM_OPS, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.slots import BLUEPRINT_KINDS, BlueprintKind
from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import OP, SLOT, HeadTable
from esper.tamiyo.networks.layers import make_head, make_op_encoder, make_value_head
from esper.tamiyo.policy.layout import (
    PAIR_FEATURES,
    PAIR_INDEX,
)
from esper.tamiyo.policy.ratios import FEATURE_SETS

NUM_KINDS = len(BLUEPRINT_KINDS)

NUM_BUMPS = 17
"""Radial basis functions on the scale of a cost, three per factor of ten."""

_COSTS = slice(PAIR_INDEX["params"], PAIR_INDEX["flops"] + 1)
_SCALES = PAIR_FEATURES[_COSTS]
assert len({(spec.low, spec.high) for spec in _SCALES}) == 1, "costs are on one scale"

assert all(each.pair[_COSTS] == _SCALES for each in FEATURE_SETS.values()), "and in one place"

_SHAPES = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads that say how an op is carried out at its slot."""


class Slots(NamedTuple):
    """What the heads read besides the output of the LSTM."""

    encoded: Tensor
    """[..., S, width], the encoding of every slot."""
    free: Tensor
    """bool [..., S], slots that exist and hold no record."""
    exists: Tensor
    """bool [..., S]."""
    pairs: Tensor
    """[..., S, B, pair features], the cost of every blueprint at every slot."""


class SlotHead(nn.Module):
    """Scores choices from the LSTM's output and the encoding of a slot.

    Args:
        width: width of the LSTM.
        slot_width: width of the encoding of a slot, and of the inner layer.
        choices: number of scores per slot.
    """

    def __init__(self, width: int, slot_width: int, choices: int) -> None:
        super().__init__()
        self.memory = nn.Linear(width, slot_width)
        self.slot = nn.Linear(slot_width, slot_width, bias=False)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(slot_width, choices))

    def forward(self, memory: Tensor, slots: Tensor) -> Tensor:
        """Return [..., S, choices] for memory [..., width] and slots [..., S, slot width]."""
        scores: Tensor = self.out(self.memory(memory).unsqueeze(-2) + self.slot(slots))
        return scores


class BlueprintHead(nn.Module):
    """Scores blueprints from the LSTM's output, the encoding of a slot, and their kind and cost.

    Args:
        width: width of the LSTM.
        slot_width: width of the encoding of a slot, and of the inner layers.
        described: number of features of a blueprint at a slot.
    """

    def __init__(self, width: int, slot_width: int, described: int) -> None:
        super().__init__()
        self.memory = nn.Linear(width, slot_width)
        self.slot = nn.Linear(slot_width, slot_width, bias=False)
        self.blueprint = nn.Sequential(
            nn.Linear(described, slot_width),
            nn.LayerNorm(slot_width),
            nn.ReLU(),
            nn.Linear(slot_width, slot_width, bias=False),
        )
        self.out = nn.Sequential(
            nn.ReLU(), nn.Linear(slot_width, slot_width), nn.ReLU(), nn.Linear(slot_width, 1)
        )

    def forward(self, memory: Tensor, slots: Tensor, described: Tensor) -> Tensor:
        """Return [..., S, B].

        Args:
            memory: [..., width].
            slots: [..., S, slot width].
            described: kinds and costs, [..., S, B, features].
        """
        shared = self.memory(memory).unsqueeze(-2) + self.slot(slots)
        scores: Tensor = self.out(shared.unsqueeze(-2) + self.blueprint(described))
        return scores.squeeze(-1)


class TravellingActorCritic(ActorCritic[Slots]):
    """The policy network for any number of slots and blueprints.

    Args:
        config: the configuration; its numbers of slots and blueprints do not affect the weights.
        kinds: the kind of every blueprint at the index that is its id.
    """

    kinds: Tensor
    bumps: Tensor

    def __init__(self, config: PolicyConfig, kinds: Sequence[BlueprintKind]) -> None:
        if len(kinds) != config.num_blueprints:
            raise UsageError(f"{config.num_blueprints} blueprints need as many kinds: {kinds!r}")
        super().__init__(config, HeadTable(config.head_sizes, by_slot=True))
        width, slot_width, sizes = config.lstm_hidden_dim, config.slot_width, config.head_sizes
        own = self._features = FEATURE_SETS[config.layout]
        described = NUM_KINDS + len(own.pair) + len(_SCALES) * NUM_BUMPS
        self.slot_net = nn.Sequential(
            nn.Linear(len(own.slot) + NUM_KINDS, slot_width),
            nn.LayerNorm(slot_width),
            nn.ReLU(),
            nn.Linear(slot_width, slot_width),
            nn.ReLU(),
        )
        self.feature_net = nn.Sequential(
            nn.Linear(len(own.host) + 2 * slot_width, width), nn.LayerNorm(width), nn.ReLU()
        )
        self.lstm = nn.LSTM(width, width, config.lstm_layers, batch_first=True)
        self.lstm_ln = nn.LayerNorm(width)
        self.slot_head = SlotHead(width, slot_width, NUM_OPS)
        self.blueprint_head = BlueprintHead(width, slot_width, described)
        for name in _SHAPES:
            self.add_module(f"{name}_head", SlotHead(width, slot_width, sizes[name]))
        self.op_head = make_head(width, sizes["op"])
        self.value_head = make_value_head(config)
        self.op_encoder = make_op_encoder(config)
        # One row per blueprint, and a last one of zeros for an empty slot, -1.
        numbers = [BLUEPRINT_KINDS.index(kind) for kind in kinds]
        rows = F.pad(F.one_hot(torch.tensor(numbers), NUM_KINDS).float(), (0, 0, 0, 1))
        self.register_buffer("kinds", rows, persistent=False)
        bumps = torch.linspace(_SCALES[0].low, _SCALES[0].high, NUM_BUMPS)
        self.register_buffer("bumps", bumps, persistent=False)
        outputs = [self.head(name).out for name in HEAD_NAMES if name != "op"]
        self.initialize([self.slot_net, self.feature_net], outputs)

    def read(self, state: Tensor, blueprint_indices: Tensor) -> tuple[Tensor, Slots]:
        """Return the input of the LSTM, and the slots that the heads read besides."""
        slots, blueprints = self.config.num_slots, self.config.num_blueprints
        features = self._features
        width, costs = len(features.slot), len(features.pair)
        host, each, pairs = state.split(
            [len(features.host), slots * width, slots * blueprints * costs], dim=-1
        )
        each = each.unflatten(-1, (slots, width))
        exists = each[..., features.index("slot", "exists")] > 0
        free = exists & (each[..., features.index("slot", "is_active")] == 0)
        encoded = self.slot_net(torch.cat([each, self.kinds[blueprint_indices]], dim=-1))
        # Slots that do not exist are 0, which changes neither the sum nor the maximum: the
        # encodings come out of a ReLU.
        there = encoded * exists.unsqueeze(-1)
        count = exists.sum(-1, keepdim=True).clamp(min=1)
        seen = torch.cat([host, there.sum(-2) / count, there.amax(-2)], dim=-1)
        encoding: Tensor = self.feature_net(seen)
        own = pairs.unflatten(-1, (slots, blueprints, costs))
        return encoding, Slots(there, free, exists, own)

    def every_logits(self, memory: Tensor, context: Slots) -> Tensor:
        """Return the logits of every head for every op, slot, or none, side by side."""
        by_op = self.slot_head(memory, context.encoded).transpose(-1, -2)
        by_slot = self.blueprint_head(memory, context.encoded, self._describe(context.pairs))
        # Without a slot the blueprint head is unused; it gets the logits of the likeliest slot.
        idle = self._likely_slot(by_op[..., LifecycleOp.GERMINATE, :], context)
        without = _at(by_slot, idle)
        shapes = [head(memory, context.encoded).flatten(-2) for head in map(self.head, _SHAPES)]
        return torch.cat(
            [by_op.flatten(-2), by_slot.flatten(-2), without, *shapes, self.op_head(memory)],
            dim=-1,
        )

    def taken_logits(self, memory: Tensor, context: Slots, taken: Tensor) -> Tensor:
        """Return the logits for the op and slot taken.

        Where the op was WAIT, the heads answer for a germination at its likeliest slot. The
        exploration terms of unused heads are computed from these.
        """
        op = taken[..., OP]
        waits = op == int(LifecycleOp.WAIT)
        by_op = self.slot_head(memory, context.encoded)
        germinate = by_op[..., LifecycleOp.GERMINATE]
        asked = torch.where(waits, int(LifecycleOp.GERMINATE), op)
        slot_logits = by_op.gather(-1, _like(asked, by_op)).squeeze(-1)
        place = torch.where(waits, self._likely_slot(germinate, context), taken[..., SLOT])
        slot = _at(context.encoded, place).unsqueeze(-2)
        pairs = _at(context.pairs, place).unsqueeze(-3)
        parts = {
            "slot": slot_logits,
            "blueprint": self.blueprint_head(memory, slot, self._describe(pairs)).squeeze(-2),
            **{head: self.head(head)(memory, slot).squeeze(-2) for head in _SHAPES},
            "op": self.op_head(memory),
        }
        wide = self.table.width
        filled = [F.pad(parts[head], (0, wide - parts[head].shape[-1])) for head in HEAD_NAMES]
        return torch.stack(filled, dim=-2)

    def _describe(self, pairs: Tensor) -> Tensor:
        """Return the features of blueprints, [..., B, features]: kinds and costs.

        A cost is also encoded by radial basis functions, so that two seeds of one kind, one twice
        as large as the other, are as easy to distinguish as two kinds.
        """
        kinds = self.kinds[:-1].expand(*pairs.shape[:-1], -1)
        spacing = self.bumps[1] - self.bumps[0]
        away = (pairs[..., _COSTS].unsqueeze(-1) - self.bumps) / spacing
        places = (-2.0 * away.square()).exp().flatten(-2)
        return torch.cat([kinds, pairs, places], dim=-1)

    def _likely_slot(self, germinate: Tensor, context: Slots) -> Tensor:
        """Return int64 [...]: the likeliest free slot to germinate at, or if none is free, any."""
        possible = torch.where(context.free.any(-1, keepdim=True), context.free, context.exists)
        return torch.where(possible, germinate.detach(), -torch.inf).argmax(-1)


def _like(index: Tensor, tensor: Tensor) -> Tensor:
    """Return indices [...] as [..., S, 1], for a gather along the last axis of [..., S, n]."""
    return index[..., None, None].expand(*tensor.shape[:-1], 1)


def _at(tensor: Tensor, place: Tensor) -> Tensor:
    """Return the entry of [..., S, n] (or with further axes) at a place [...]."""
    extra = tensor.dim() - place.dim()
    index = place.view(*place.shape, *[1] * extra)
    shape = (*tensor.shape[: place.dim()], 1, *tensor.shape[place.dim() + 1 :])
    return tensor.gather(place.dim(), index.expand(shape)).squeeze(place.dim())
