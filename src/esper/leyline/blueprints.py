"""The fixed ids of the built-in blueprints, what kind each is, and the activations of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

Topology = Literal["cnn", "sequence", "vector"]
"""Kind of activation at a slot: [B, C, H, W], [B, T, C] or [B, C]."""

TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

TOPOLOGY_BY_RANK: dict[int, Topology] = {4: "cnn", 3: "sequence", 2: "vector"}

BlueprintKind = Literal[
    "identity",
    "norm",
    "convolution",
    "depthwise",
    "bottleneck",
    "attention",
    "lora",
    "mlp",
    "other",
]
"""Roughly what a blueprint does; a stranger that does not say so is 'other'."""

BLUEPRINT_KINDS: tuple[BlueprintKind, ...] = get_args(BlueprintKind)

_BUILTIN: dict[str, BlueprintKind] = {
    "noop": "identity",
    "conv_light": "convolution",
    "attention": "attention",
    "norm": "norm",
    "depthwise": "depthwise",
    "bottleneck": "bottleneck",
    "conv_small": "convolution",
    "conv_heavy": "convolution",
    "lora": "lora",
    "lora_large": "lora",
    "mlp_small": "mlp",
    "mlp": "mlp",
    "flex_attention": "attention",
}

BUILTIN_BLUEPRINTS: tuple[str, ...] = tuple(_BUILTIN)
"""Name of every built-in blueprint at the index that is its id; a registered one gets the next."""

BUILTIN_KINDS: tuple[BlueprintKind, ...] = tuple(_BUILTIN.values())
"""The kind of every built-in blueprint at the index that is its id."""

NUM_BLUEPRINTS = len(BUILTIN_BLUEPRINTS)

NOOP = BUILTIN_BLUEPRINTS.index("noop")
"""The identity; never selectable, and the placeholder wherever no blueprint is chosen."""


def kinds_of(names: Sequence[str]) -> tuple[BlueprintKind, ...]:
    """Return the kinds of blueprints by name, as far as they are built in; 'other' elsewhere."""
    return tuple(_BUILTIN.get(name, "other") for name in names)


def channel_axis(topology: Topology) -> int:
    """Return the axis that holds the channels."""
    return 1 if topology == "cnn" else -1
