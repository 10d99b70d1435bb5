"""Drawing the initial weights of seeds and gates from random streams of their own.

The stream is named by (run seed of the network, slot, number of germinations so far), so a seed's
weights do not depend on what else was drawn, nor on which engine grows it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.kasmina.blending import GateNetwork
from esper.kasmina.blueprints.registry import Blueprint
from esper.leyline.blueprints import Topology
from esper.leyline.randomness import seeded

Key = tuple[int, int, int]
"""(run seed, slot, germinations so far)."""


def draw_seed(blueprint: Blueprint, channels: int, topology: Topology, key: Key) -> nn.Module:
    """Return a fresh seed on the CPU."""
    with seeded(*key, "seed"):
        return blueprint.build(channels, topology)


def draw_gate(channels: int, topology: Topology, key: Key) -> nn.Module:
    """Return a fresh gate network on the CPU."""
    with seeded(*key, "gate"):
        return GateNetwork(channels, topology)


def draw_probe(shape: tuple[int, ...], key: Key) -> Tensor:
    """Return random activations of this shape, to try a fresh seed on."""
    with seeded(*key, "probe"):
        return torch.randn((2, *shape[1:]))
