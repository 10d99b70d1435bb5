"""Training FLOPs of a network with some of its blocks asleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

from torch import nn

from esper.growth.depth.stacks import Stack
from esper.kasmina.flops import HOW_TO_COUNT, PASSES_OF_TRAINING, forward_flops
from esper.leyline.errors import warn


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
    with catch_warnings():
        # What the network itself warns of, it says when it trains.
        simplefilter("ignore")
        count = forward_flops(module, args, kwargs)
    if count.uncounted:
        warn(
            f"the operations of {count.describe_uncounted()} cannot be counted; the training FLOPs "
            f"are without them, {HOW_TO_COUNT}"
        )
    prefix = f"{path}." if path else ""
    blocks = {
        name: [PASSES_OF_TRAINING * count.by_module[one.removeprefix(prefix)] for one in own.blocks]
        for name, own in stacks.items()
    }
    whole = count.training
    return Costs(
        whole - sum(map(sum, blocks.values())),
        {name: sum(flops) / len(flops) for name, flops in blocks.items()},
    )
