"""Which seeds learn in an epoch, what is clipped together, and which seeds are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.population.seed_stacks import ABSENT, GATE, IS_BLENDED, SeedStack, SeedStacks
from esper.population.slot_index import Integers


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Rows whose seeds at a slot are alike: blueprint, gate or none, learning or not."""

    slot: int
    kind: int
    rows: Integers
    entries: Integers
    gate_entries: Integers | None
    """Entries of their gates; None where they have none."""
    size: int
    """Parameters of a seed with its gate."""
    is_learning: bool


def learning_entries(stack: SeedStack, state: SlotState) -> NDArray[np.bool_]:
    """Return bool [entries]: the parameters of which seeds move in this epoch."""
    rows = np.array(stack.rows, dtype=np.int64)
    stage, alpha = state.stage.numpy()[:, stack.slot], state.alpha.numpy()[:, stack.slot]
    moving = IS_BLENDED[stage] & (alpha > 0)
    moving |= stage == int(SeedStage.TRAINING)
    moving &= state.alpha_mode.numpy()[:, stack.slot] != int(AlphaMode.DOWN)
    return np.where(rows == ABSENT, False, moving[np.maximum(rows, 0)])


def gate_pairs(
    seed_stacks: SeedStacks,
) -> Iterator[tuple[SeedStack, SeedStack, Integers, Integers]]:
    """Yield (gates, seeds, gates' entries, seeds' entries): pairs are clipped together."""
    for gates in seed_stacks.stacks:
        if gates.kind != GATE:
            continue
        slot = gates.slot
        for seeds in seed_stacks.at_slot(slot):
            rows = np.array(seeds.rows, dtype=np.int64)
            has_gate = seed_stacks.gate_entries[np.maximum(rows, 0), slot] != ABSENT
            there = np.flatnonzero((rows != ABSENT) & has_gate)
            if len(there):
                yield gates, seeds, seed_stacks.gate_entries[rows[there], slot], there


def group_seeds(
    seed_stacks: SeedStacks, state: SlotState, stages: Sequence[int]
) -> Iterator[SeedGroup]:
    """Yield the seeds that are in one of these stages, those that are alike together."""
    wanted = np.isin(state.stage.numpy(), stages)
    widths = {(stack.slot, stack.kind): stack.parameters.width for stack in seed_stacks.stacks}
    for stack in seed_stacks.stacks:
        if stack.kind == GATE:
            continue
        slot, moving = stack.slot, learning_entries(stack, state)
        rows = np.flatnonzero(wanted[:, slot] & (seed_stacks.kinds[:, slot] == stack.kind))
        entries, gates = seed_stacks.entries[rows, slot], seed_stacks.gate_entries[rows, slot]
        for has_gate in (False, True):
            for is_learning in (False, True):
                mine = ((gates != ABSENT) == has_gate) & (moving[entries] == is_learning)
                if mine.any():
                    yield SeedGroup(
                        slot,
                        stack.kind,
                        rows[mine],
                        entries[mine],
                        gates[mine] if has_gate else None,
                        widths[slot, stack.kind] + (widths[slot, GATE] if has_gate else 0),
                        is_learning,
                    )
