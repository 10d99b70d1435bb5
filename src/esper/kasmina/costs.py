"""What a seed would cost in a slot, and which seeds fit within the growth limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blending import GateNetwork
from esper.kasmina.blueprints.registry import (
    Blueprint,
    blueprint_by_id,
    blueprint_names,
    count_parameters,
    selectable,
)
from esper.kasmina.slot import Slot
from esper.leyline.blueprints import Topology


def seed_parameters(blueprint: Blueprint, channels: int, topology: Topology) -> int:
    """Return the most parameters such a seed can come to have, a gate network included.

    Any style may be set later, so a limit always reserves room for the gate.
    """
    return count_parameters(blueprint, channels, topology) + gate_parameters(channels, topology)


@lru_cache(maxsize=1024)
def gate_parameters(channels: int, topology: Topology) -> int:
    """Return the parameters of a gate network of this width."""
    with torch.device("meta"):
        gate = GateNetwork(channels, topology)
    return sum(parameter.numel() for parameter in gate.parameters())


def seed_flops(blueprint: Blueprint, topology: Topology, shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of one sample's forward pass through such a seed."""
    return _flops(blueprint, topology, (1, *shape[1:]))


@lru_cache(maxsize=4096)
def _flops(blueprint: Blueprint, topology: Topology, shape: tuple[int, ...]) -> int:
    channels = shape[1] if topology == "cnn" else shape[-1]
    with torch.device("meta"):
        seed = blueprint.build(channels, topology).eval()
        x = torch.empty(shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        seed(x)
    return int(counter.get_total_flops())


def fitting_blueprints(
    slots: Sequence[Slot], grown: Sequence[int], *, parameters: int | None, flops: int | None
) -> Tensor:
    """Return bool [1, S, B]: the blueprints that fit each slot.

    Args:
        slots: the slots of one garden.
        grown: blueprint id of the seed in each slot, -1 where there is none.
        parameters: parameters that may still be added, None without a limit.
        flops: operations per sample that all seeds together may use, None without a limit.
    """
    result = torch.zeros((1, len(slots), len(blueprint_names())), dtype=torch.bool)
    if parameters is not None:
        # A seed without a gate may be given one later: its room is always reserved.
        parameters -= sum(
            gate_parameters(slot.channels, slot.topology)
            for slot in slots
            if slot.seed is not None and slot.gate is None
        )
    if flops is not None:
        flops -= sum(
            seed_flops(blueprint_by_id(choice), slot.topology, slot.shape)
            for slot, choice in zip(slots, grown, strict=True)
            if choice >= 0
        )
    for index, slot in enumerate(slots):
        for choice in selectable(slot.topology):
            blueprint = blueprint_by_id(choice)
            size = seed_parameters(blueprint, slot.channels, slot.topology)
            fits = parameters is None or size <= parameters
            if fits and flops is not None:
                fits = seed_flops(blueprint, slot.topology, slot.shape) <= flops
            result[0, index, choice] = fits
    return result
