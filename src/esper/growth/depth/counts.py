"""How many blocks of every stack can be awake."""

from __future__ import annotations

import math
from collections.abc import Mapping

from esper.growth.depth.rules import Decision
from esper.growth.depth.stacks import Stack
from esper.leyline.errors import UsageError, unknown_name

Stacks = Mapping[str, Stack]


def a_share(stacks: Stacks, share: float) -> dict[str, int]:
    """Return a share of the blocks of every stack, rounded up to what can be awake."""
    return {
        name: stack.period * math.ceil(share * len(stack.blocks) / stack.period)
        for name, stack in stacks.items()
    }


def double(stacks: Stacks, awake: Mapping[str, int]) -> dict[str, int]:
    """Return twice the blocks awake, by stack, as far as there are as many."""
    return {name: min(len(stack.blocks), 2 * awake[name]) for name, stack in stacks.items()}


def fill_in(stacks: Stacks, decision: Decision, awake: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks that a decision wants awake, by stack."""
    blocks = {name: len(stack.blocks) for name, stack in stacks.items()}
    assert decision is not None
    if isinstance(decision, Mapping):
        for name in decision:
            if name not in blocks:
                raise unknown_name("stack", name, blocks)
        return {**blocks, **awake, **decision}
    if decision > max(blocks.values()):
        raise UsageError(f"{decision} blocks cannot be awake, there are {listed(blocks)}")
    return {name: min(decision, count) for name, count in blocks.items()}


def resolve(stacks: Stacks, decision: Decision, awake: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks to be awake by stack; refuse a number that cannot be."""
    wanted = fill_in(stacks, decision, awake)
    for name, count in wanted.items():
        period, most = stacks[name].period, len(stacks[name].blocks)
        if not max(1, awake.get(name, 1)) <= count <= most:
            raise UsageError(
                f"{count} blocks of {name} cannot be awake, only {awake.get(name, 1)} to {most}: "
                "blocks do not fall asleep again"
            )
        if count % period and count != most:
            raise UsageError(
                f"{count} blocks of {name} cannot be awake: {period} kinds of blocks alternate "
                f"there, so it must be a multiple of {period}, or all {most}"
            )
    return wanted


def listed(blocks: Mapping[str, int]) -> str:
    """Return numbers of blocks in words."""
    return ", ".join(f"{count} in {name}" for name, count in blocks.items())
