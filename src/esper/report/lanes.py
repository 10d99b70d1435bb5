"""What happened at each slot: stages with their amplitudes, lives of seeds, decisions as marks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    SeedRecord,
    SlotRecord,
    decisions_of,
    seed_records,
)
from esper.leyline.stages import EMPTY_STAGES
from esper.report.frame import Frame
from esper.report.markup import (
    argument_words,
    element,
    number,
    op_words,
    outcome_words,
    tooltip,
    visible,
)

SHAPES: dict[str, str] = {
    "GERMINATE": "M0 -8L7.5 6H-7.5Z",
    "ADVANCE": "M-5 -7.5L8 0L-5 7.5Z",
    "SET_ALPHA_TARGET": "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0 -7 0Z",
    "FOSSILIZE": "M0 -9L9 0L0 9L-9 0Z",
    "PRUNE": "M-7 -7L7 7M7 -7L-7 7",
}
"""Outline of every operation's mark, around its own centre."""

_OTHER = "M-6 -6H6V6H-6Z"
# Marks closer than this cover each other; one stands for all of the same kind.
_CELL = 4.0


def draw_mark(op: str, x: float, y: float, *, done: bool = True, told: str = "") -> str:
    """Draw one mark around a point, with what a resting pointer is told."""
    shape = element(
        "path",
        class_="mark cross" if op == "PRUNE" else "mark",
        d=SHAPES.get(op, _OTHER),
    )
    children = (tooltip(told), shape) if told else (shape,)
    return element(
        "g",
        *children,
        class_="decision" if done else "decision refused",
        transform=f"translate({number(x)} {number(y)})",
    )


def draw_marks(
    decisions: Sequence[tuple[int, DecisionRecord]], frame: Frame, y: float
) -> Iterator[str]:
    """Draw the decisions of one slot along a line."""
    cells: dict[tuple[str, bool, int], list[tuple[int, DecisionRecord]]] = {}
    for epoch, decision in decisions:
        done = decision.outcome == "done"
        cell = (decision.op, done, int(frame.x(epoch) / _CELL))
        cells.setdefault(cell, []).append((epoch, decision))
    for (op, done, _), members in cells.items():
        epoch, decision = members[0]
        told = tell_decision(epoch, decision)
        if len(members) > 1:
            told += f" (and {len(members) - 1} more like it up to epoch {members[-1][0]})"
        yield draw_mark(op, frame.x(epoch), y, done=done, told=told)


def tell_decision(epoch: int, decision: DecisionRecord) -> str:
    """Return a decision in one line."""
    where = "" if decision.slot is None else f" {visible(decision.slot)}"
    arguments = argument_words(decision)
    told = f"after epoch {epoch}: {op_words(decision.op)}{where}"
    told += f" ({arguments})" if arguments else ""
    told += f": {outcome_words(decision.outcome)}"
    return f"{told}, {visible(decision.reason)}" if decision.reason else told


# Columns narrower than a unit of the picture cannot be told apart.
_MOST_COLUMNS = 600
_MOST_CELLS = 9_000
"""With many slots there are fewer columns: the picture's size stays bounded."""
MOST_LANES = 40
"""Lanes drawn at most."""


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
    if any(slot.stage == stage.name for stage in EMPTY_STAGES):
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
