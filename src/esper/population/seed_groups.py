"""Who of the seeds in a nursery learns, what is clipped together, and who is alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.population.seed_stacks import GATE, IS_BLENDED, NOBODY, Bed, Nursery
from esper.population.slot_index import Integers


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose seeds at a slot are alike: blueprint, gate or none, learning or not."""

    slot: int
    kind: int
    rows: Integers
    places: Integers
    gates: Integers | None
    """Places of their gates; None where they have none."""
    size: int
    """Parameters of a seed with its gate."""
    is_learning: bool


def learning(bed: Bed, state: SlotState) -> NDArray[np.bool_]:
    """Return bool [places]: whose parameters move in this epoch."""
    rows = np.array(bed.rows, dtype=np.int64)
    stage, alpha = state.stage.numpy()[:, bed.slot], state.alpha.numpy()[:, bed.slot]
    moving = IS_BLENDED[stage] & (alpha > 0)
    moving |= stage == int(SeedStage.TRAINING)
    moving &= state.alpha_mode.numpy()[:, bed.slot] != int(AlphaMode.DOWN)
    return np.where(rows == NOBODY, False, moving[np.maximum(rows, 0)])


def pairs(nursery: Nursery) -> Iterator[tuple[Bed, Bed, Integers, Integers]]:
    """Yield (gates, seeds, places, places): a seed and its gate, which are clipped together."""
    for gates in nursery.beds:
        if gates.kind != GATE:
            continue
        slot = gates.slot
        for seeds in nursery.seed_beds(slot):
            rows = np.array(seeds.rows, dtype=np.int64)
            has_gate = nursery.gates[np.maximum(rows, 0), slot] != NOBODY
            there = np.flatnonzero((rows != NOBODY) & has_gate)
            if len(there):
                yield gates, seeds, nursery.gates[rows[there], slot], there


def groups(nursery: Nursery, state: SlotState, stages: Sequence[int]) -> Iterator[Group]:
    """Yield the seeds that are in one of these stages, those that are alike together."""
    wanted = np.isin(state.stage.numpy(), stages)
    gate_widths = {bed.slot: bed.stack.width for bed in nursery.beds if bed.kind == GATE}
    for bed in nursery.beds:
        if bed.kind == GATE:
            continue
        slot, moving = bed.slot, learning(bed, state)
        rows = np.flatnonzero(wanted[:, slot] & (nursery.kinds[:, slot] == bed.kind))
        places, gates = nursery.places[rows, slot], nursery.gates[rows, slot]
        for has_gate in (False, True):
            for is_learning in (False, True):
                mine = ((gates != NOBODY) == has_gate) & (moving[places] == is_learning)
                if mine.any():
                    yield Group(
                        slot,
                        bed.kind,
                        rows[mine],
                        places[mine],
                        gates[mine] if has_gate else None,
                        bed.stack.width + (gate_widths[slot] if has_gate else 0),
                        is_learning,
                    )
