"""The fixed ids of the built-in blueprints, and the kinds of activation a slot can have."""

from __future__ import annotations

from typing import Literal, get_args

Topology = Literal["cnn", "sequence", "vector"]
"""Kind of activation at a slot: [B, C, H, W], [B, T, C] or [B, C]."""

TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

TOPOLOGY_BY_RANK: dict[int, Topology] = {4: "cnn", 3: "sequence", 2: "vector"}

BUILTIN_BLUEPRINTS: tuple[str, ...] = (
    "noop",
    "conv_light",
    "attention",
    "norm",
    "depthwise",
    "bottleneck",
    "conv_small",
    "conv_heavy",
    "lora",
    "lora_large",
    "mlp_small",
    "mlp",
    "flex_attention",
)
"""Name of every built-in blueprint at the index that is its id; a registered one gets the next."""

NUM_BLUEPRINTS = len(BUILTIN_BLUEPRINTS)

NOOP = BUILTIN_BLUEPRINTS.index("noop")
"""The identity; never selectable, and the placeholder wherever no blueprint is chosen."""


def channel_axis(topology: Topology) -> int:
    """Return the axis that holds the channels."""
    return 1 if topology == "cnn" else -1
