"""Training FLOPs of a network with some of its blocks asleep."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import nn

from esper.growth.depth.stacks import Stack
from esper.kasmina.costs import flop_counter
from esper.kasmina.probe import evaluating, tensors_in
from esper.leyline.randomness import drawing

_PASSES = 3
"""Forward passes that a training step costs: the backward pass is worth two."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Training FLOPs of one batch."""

    base: int
    """Of everything but the blocks of stacks."""
    block: Mapping[str, float]
    """Of one block, by stack; the mean over its blocks."""

    def per_batch(self, awake: Mapping[str, int]) -> float:
        """Return the FLOPs of a batch with these blocks awake; sleeping ones cost nothing."""
        return self.base + sum(self.block[name] * count for name, count in awake.items())


def count_costs(
    module: nn.Module,
    path: str,
    stacks: Mapping[str, Stack],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Costs:
    """Count the FLOPs of one batch with all blocks awake.

    Args:
        module: what is called, the network or a part of it.
        path: its name in the network.
        stacks: the stacks within it.
        args: with what it is called.
        kwargs: likewise, by name.
    """
    device = next((one.device for one in tensors_in((args, kwargs))), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(catch_warnings())
        simplefilter("ignore")
        for part in (evaluating(module), drawing(device, "flops"), torch.no_grad()):
            stack.enter_context(part)
        counter = stack.enter_context(flop_counter())
        module(*args, **kwargs)
    root = type(module).__name__
    counts = {name: sum(by.values()) for name, by in counter.get_flop_counts().items()}
    prefix = f"{path}." if path else ""
    blocks = {
        name: [_PASSES * counts.get(f"{root}.{one.removeprefix(prefix)}", 0) for one in own.blocks]
        for name, own in stacks.items()
    }
    whole = _PASSES * int(counter.get_total_flops())
    return Costs(
        whole - sum(map(sum, blocks.values())),
        {name: sum(flops) / len(flops) for name, flops in blocks.items()},
    )
