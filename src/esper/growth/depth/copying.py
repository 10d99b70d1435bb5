"""Copying blocks: weights, buffers and the state that optimizers keep for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.optimizer import copy_state

Order = Literal["stack", "interleave"]

ORDERS: tuple[Order, ...] = ("stack", "interleave")


def plan_copies(
    before: int, after: int, order: Order, period: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (target, source) for every block that changes, in the order in which to copy.

    Three blocks a b c become a b c a b c when stacked, a a b b c c when interleaved. Where fewer
    are added, the stack ends as it did: a b c d become a b c d c d. Blocks that alternate (period
    2: attention of two kinds) are moved in groups of that size.

    Args:
        before: number of blocks awake, a multiple of the period.
        after: number of blocks that will be awake.
        order: 'stack' or 'interleave'.
        period: number of blocks after which their kinds repeat.
    """
    if order == "stack":
        whole = after - after % before
        added = -(-(after - before) // period) * period
        for target in range(before, after):
            yield target, target % before if target < whole else target - added
        return
    groups = -(-after // period)
    # From the last to the first: no source is overwritten before it was copied.
    for target in reversed(range(after)):
        group, phase = divmod(target, period)
        source = group * (before // period) // groups * period + phase
        if source != target:
            yield target, source


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module) -> None:
    """Give a block the parameters and buffers of another one."""
    for one, other in zip(_tensors(target), _tensors(source), strict=True):
        one.copy_(other)


def copy_optimizer_state(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Give the parameters of a block the optimizer state of another block's; groups stay."""
    for one, other in zip(target.parameters(), source.parameters(), strict=True):
        for optimizer in optimizers:
            copy_state(optimizer, other, one)


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]
