"""Decisions as marks: one shape for every operation, hollow where it was refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from esper.leyline.records import DecisionRecord, EpochRecord
from esper.report.frame import Frame
from esper.report.svg import element, number, tooltip
from esper.report.text import format_number, visible

SHAPES: dict[str, str] = {
    "GERMINATE": "M0 -8L7.5 6H-7.5Z",
    "ADVANCE": "M-5 -7.5L8 0L-5 7.5Z",
    "SET_ALPHA_TARGET": "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0 -7 0Z",
    "FOSSILIZE": "M0 -9L9 0L0 9L-9 0Z",
    "PRUNE": "M-7 -7L7 7M7 -7L-7 7",
}
"""Outline of every operation's mark, around its own centre."""

WAIT = "WAIT"

_OTHER = "M-6 -6H6V6H-6Z"
# Marks closer than this cover each other; one stands for all of the same kind.
_CELL = 4.0


def op_words(op: str) -> str:
    """Return an operation's name as words."""
    return visible(op).replace("_", " ").lower()


def argument_words(decision: DecisionRecord) -> str:
    """Return the arguments an operation used, or an empty text."""
    given = {
        "blueprint": decision.blueprint,
        "style": decision.style and decision.style.lower(),
        "tempo": decision.tempo,
        "alpha target": None
        if decision.alpha_target is None
        else format_number(decision.alpha_target, decimals=2),
        "speed": decision.alpha_speed,
        "curve": decision.alpha_curve and decision.alpha_curve.lower(),
    }
    return ", ".join(
        f"{name} {visible(value)}" for name, value in given.items() if value is not None
    )


def outcome_words(outcome: str) -> str:
    """Return an outcome as words."""
    return visible(outcome).replace("_", " ")


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


def decisions_of(history: Sequence[EpochRecord]) -> list[tuple[int, DecisionRecord]]:
    """Return every decision but WAIT with its epoch."""
    return [
        (record.epoch, record.decision)
        for record in history
        if record.decision is not None and record.decision.op != WAIT
    ]


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
