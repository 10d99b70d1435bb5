"""What happened at each slot: stages with their amplitudes, lives of seeds, decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from esper.leyline.records import DecisionRecord, EpochRecord, SeedRecord, SlotRecord, seed_records
from esper.leyline.stages import EMPTY_STAGES
from esper.report.marks import decisions_of

# Columns narrower than a unit of the picture cannot be told apart.
_MOST_COLUMNS = 600
_MOST_CELLS = 9_000
"""With many slots there are fewer columns: the picture's size stays bounded."""
MOST_LANES = 40
"""Lanes drawn at most."""
_EMPTY = frozenset(stage.name for stage in EMPTY_STAGES)


@dataclass(slots=True)
class StageRun:
    """Epochs in a row that a seed spent in one stage."""

    stage: str
    blueprint: str | None
    begin: float
    end: float
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """Where alpha was constant: from, to, alpha."""


@dataclass(slots=True)
class Lane:
    """One slot: its runs, the lives of its seeds, the decisions about it."""

    name: str
    runs: list[StageRun] = field(default_factory=list)
    lives: list[SeedRecord] = field(default_factory=list)
    decisions: list[tuple[int, DecisionRecord]] = field(default_factory=list)


def read_lanes(history: Sequence[EpochRecord]) -> list[Lane]:
    """Return a lane for every slot that a run speaks of, in order of appearance."""
    lanes: dict[str, Lane] = {}
    slots = min(len(history[-1].slots), MOST_LANES)
    columns = min(_MOST_COLUMNS, _MOST_CELLS // max(slots, 1))
    stride = math.ceil(len(history) / columns)
    seen = history[(len(history) - 1) % stride :: stride]
    begin = float(history[0].epoch - 1)
    for record in seen:
        for slot in record.slots:
            lane = lanes.setdefault(slot.name, Lane(slot.name))
            _extend(lane.runs, slot, begin, float(record.epoch))
        begin = float(record.epoch)
    for life in seed_records(tuple(history)):
        lanes.setdefault(life.slot, Lane(life.slot)).lives.append(life)
    for epoch, decision in decisions_of(history):
        if decision.slot is not None:
            lane = lanes.setdefault(decision.slot, Lane(decision.slot))
            lane.decisions.append((epoch, decision))
    return list(lanes.values())


def _extend(runs: list[StageRun], slot: SlotRecord, begin: float, end: float) -> None:
    if slot.stage in _EMPTY:
        return
    alpha = min(max(slot.alpha, 0.0), 1.0) if math.isfinite(slot.alpha) else 0.0
    last = runs[-1] if runs else None
    if last is None or (last.stage, last.blueprint, last.end) != (
        slot.stage,
        slot.blueprint,
        begin,
    ):
        runs.append(StageRun(slot.stage, slot.blueprint, begin, end, [(begin, end, alpha)]))
        return
    last.end = end
    since, _, before = last.steps[-1]
    if round(before, 3) == round(alpha, 3):
        last.steps[-1] = (since, end, before)
    else:
        last.steps.append((begin, end, alpha))
