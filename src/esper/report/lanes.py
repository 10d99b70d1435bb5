"""The lower panel: one lane per slot, with stages as colours and alpha as height."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from esper.leyline.history import DecisionRecord, EpochRecord, SeedRecord, SlotRecord, seed_records
from esper.report.frame import Frame
from esper.report.labels import Placed, Wish, place_labels, text_width
from esper.report.marks import decisions_of, draw_marks
from esper.report.style import MARGIN, ROW, STAGE_CLASSES, WIDTH
from esper.report.svg import element, label, tooltip
from esper.report.text import escaped, format_contribution, format_number, shortened, visible

BAND = 46.0
"""Height of a band at alpha 1."""

_RIBBON_TOP = BAND + 2
_RIBBON = 7.0
_MARKS = _RIBBON_TOP + _RIBBON + 14
_MARKS_END = _MARKS + 11
_EMPTY = 12.0
_GAP = 14.0
_ROWS = 4
_NAME_LENGTH = 40
_BLUEPRINT_LENGTH = 24
# Columns narrower than half a unit cannot be told apart.
_MOST_COLUMNS = 1200


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
    stride = math.ceil(len(history) / _MOST_COLUMNS)
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


def draw_lanes(lanes: Sequence[Lane], frame: Frame, top: float) -> tuple[list[str], float, int]:
    """Draw the lanes one below the other.

    Returns:
        The drawing, where it ends, and how many labels found no room.
    """
    drawing: list[str] = []
    left_out = 0
    for lane in lanes:
        parts, top, missing = _draw_lane(lane, frame, top)
        drawing.extend(parts)
        left_out += missing
    return drawing, top, left_out


def _draw_lane(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    name = shortened(lane.name, _NAME_LENGTH)
    names, no_name = place_labels(
        [
            Wish(shortened(life.blueprint, _BLUEPRINT_LENGTH), frame.x(life.germinated), "start")
            for life in lane.lives
        ],
        left=MARGIN,
        right=WIDTH - MARGIN,
        rows=_ROWS,
        taken=MARGIN + text_width(name),
    )
    gains, no_gain = place_labels(
        [
            Wish(
                format_contribution(life.contribution, life.contribution_se),
                frame.x(_last_epoch(life, frame)),
                "end",
            )
            for life in lane.lives
        ],
        left=MARGIN,
        right=WIDTH - MARGIN,
        rows=_ROWS,
    )
    is_used = bool(lane.runs or lane.decisions)
    band_top = top + ROW * (1 + max((placed.row for placed in names), default=0))
    band_height = BAND if is_used else _EMPTY
    drawing = [
        element(
            "rect",
            class_="well",
            x=frame.left,
            y=band_top,
            width=frame.right - frame.left,
            height=band_height,
        ),
        *frame.gridlines(band_top, band_top + band_height),
        element(
            "text",
            tooltip(f"slot {visible(lane.name)}"),
            escaped(name),
            class_="strong halo",
            x=MARGIN,
            y=band_top - 7,
        ),
    ]
    if not is_used:
        drawing.append(
            label(
                "never used", class_="muted halo", x=frame.right, y=band_top - 7, text_anchor="end"
            )
        )
        return drawing, band_top + band_height + _GAP, 0
    drawing.extend(_alpha_scale(frame, band_top))
    for run in lane.runs:
        drawing.append(_draw_run(lane.name, run, frame, band_top))
    drawing.extend(draw_marks(lane.decisions, frame, band_top + _MARKS))
    drawing.extend(_draw_label(placed, band_top - 7 - placed.row * ROW, "0") for placed in names)
    bottom = band_top + _MARKS_END
    drawing.extend(
        _draw_label(placed, bottom + placed.row * ROW, ".95em", "number muted") for placed in gains
    )
    rows = 1 + max((placed.row for placed in gains), default=-1)
    return drawing, bottom + rows * ROW + _GAP, no_name + no_gain


def _draw_run(slot: str, run: StageRun, frame: Frame, top: float) -> str:
    kind = STAGE_CLASSES.get(run.stage, "cooldown")
    x, width = frame.x(run.begin), frame.x(run.end) - frame.x(run.begin)
    parts = [tooltip(_tell_run(slot, run))]
    if kind == "cooldown":
        parts.append(
            element(
                "rect",
                class_=kind,
                x=x + 1,
                y=top + _RIBBON_TOP + 1,
                width=max(width - 2, 0.5),
                height=_RIBBON - 2,
            )
        )
        return element("g", *parts, class_="run")
    parts.append(element("rect", class_=f"tint {kind}", x=x, y=top, width=width, height=BAND))
    for begin, end, alpha in run.steps:
        if alpha > 0:
            height = alpha * BAND
            parts.append(
                element(
                    "rect",
                    class_=f"alpha {kind}",
                    x=frame.x(begin),
                    y=top + BAND - height,
                    width=frame.x(end) - frame.x(begin),
                    height=height,
                )
            )
    parts.append(
        element(
            "rect", class_=f"ribbon {kind}", x=x, y=top + _RIBBON_TOP, width=width, height=_RIBBON
        )
    )
    return element("g", *parts, class_="run")


def _alpha_scale(frame: Frame, top: float) -> Iterator[str]:
    for text, y, dy in (("α 1", top, ".8em"), ("0", top + BAND, "0")):
        yield label(text, class_="muted number", x=frame.left - 8, y=y, dy=dy, text_anchor="end")


def _draw_label(placed: Placed, y: float, dy: str, kind: str = "") -> str:
    return label(
        placed.text,
        class_=f"halo {kind}".strip(),
        x=placed.x,
        y=y,
        dy=dy,
        text_anchor=placed.anchor,
    )


def _tell_run(slot: str, run: StageRun) -> str:
    first, last = run.begin + 1, run.end
    epochs = f"epoch {last:g}" if first >= last else f"epochs {first:g} to {last:g}"
    told = [visible(run.stage).lower(), epochs]
    if run.blueprint is not None:
        told.insert(0, visible(run.blueprint))
    if run.steps:
        alphas = [format_number(run.steps[index][2], decimals=2) for index in (0, -1)]
        told.append(
            f"alpha {alphas[0]}" if len(set(alphas)) == 1 else f"alpha {' to '.join(alphas)}"
        )
    return f"{visible(slot)}: {', '.join(told)}"


def _extend(runs: list[StageRun], slot: SlotRecord, begin: float, end: float) -> None:
    if slot.stage in ("UNKNOWN", "DORMANT"):
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


def _last_epoch(life: SeedRecord, frame: Frame) -> float:
    # A fossilized seed has come to the end of its development, but it is there until the end.
    if life.fate == "pruned" and life.ended is not None:
        return float(life.ended)
    return frame.x.high
