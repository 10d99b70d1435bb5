"""The lower panel: one lane per slot, stages as colours, alpha as height, decisions as marks.

Its frame, epochs along the width and texts beside one another, is that of the whole picture.
"""

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
from esper.nissa.report.markup import (
    NOT_MEASURED,
    Scale,
    argument_words,
    element,
    escaped,
    format_contribution,
    format_number,
    label,
    number,
    op_words,
    outcome_words,
    rectangle,
    round_ticks,
    shortened,
    tick_labels,
    tooltip,
    visible,
    width_in_em,
)
from esper.nissa.report.page import FONT, MARGIN, ROW, STAGE_CLASSES, WIDTH
from esper.utils.process import grouped

# ---- Texts beside one another: each gets a row in which it is free of the others


_LABEL_GAP = 10.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A text and where it would like to be."""

    text: str
    x: float
    anchor: str
    """Which end of the text is at `x`: start or end."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A text with the place it got."""

    text: str
    x: float
    anchor: str
    row: int
    wished: float
    """Where it would have liked to be, for a line that leads there."""


def text_width(text: str, *, is_strong: bool = False) -> float:
    """Return the room a text needs at the largest size."""
    return width_in_em(text) * FONT * (1.12 if is_strong else 1.0)


def place_labels(
    wishes: Sequence[Wish], *, left: float, right: float, rows: int, taken: float = 0.0
) -> tuple[list[Placed], int]:
    """Give every text a row in which it is free of the others.

    Args:
        wishes: The texts, in the order in which they choose.
        left: No text begins before.
        right: No text ends beyond; one that would is aligned to this edge.
        rows: How many rows there may be; a text that fits none of them is left out.
        taken: Row 0 is occupied from `left` to here.

    Returns:
        The placed texts, and how many were left out.
    """
    occupied: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
    if taken > left:
        occupied[0].append((left, taken))
    placed: list[Placed] = []
    for wish in wishes:
        width = text_width(wish.text)
        x, anchor = wish.x, wish.anchor
        if anchor == "start" and x + width > right:
            x, anchor = right, "end"
        elif anchor == "end" and x - width < left:
            x, anchor = left, "start"
        begin = x if anchor == "start" else x - width
        end = begin + width
        for row, spans in enumerate(occupied):
            if all(end + _LABEL_GAP <= low or begin >= high + _LABEL_GAP for low, high in spans):
                spans.append((begin, end))
                placed.append(Placed(wish.text, x, anchor, row, wish.x))
                break
    return placed, len(wishes) - len(placed)


AXIS_NAME = "epoch"
LANE_SCALE = "α 1"
"""The upper end of a lane, named in the room left of it."""

_TICK_ROOM = 78.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The horizontal extent of the panels, in epochs and in units."""

    x: Scale

    @property
    def left(self) -> float:
        """Where the first epoch begins."""
        return self.x.start

    @property
    def right(self) -> float:
        """Where the last epoch ends."""
        return self.x.end

    def ticks(self) -> list[float]:
        """Return the epochs that are named on the axis."""
        room = max(2, int((self.right - self.left) / _TICK_ROOM))
        return round_ticks(self.x.low, self.x.high, room, whole=True)

    def gridlines(self, top: float, bottom: float) -> Iterator[str]:
        """Draw a fine line at every tick."""
        for tick in self.ticks():
            x = self.x(tick)
            yield element("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom)

    def axis(self, top: float) -> Iterator[str]:
        """Draw the axis itself, with its numbers below it."""
        yield element("line", class_="axis", x1=self.left, x2=self.right, y1=top, y2=top)
        ticks, y = self.ticks(), top + 5
        for tick, text in zip(ticks, tick_labels(ticks), strict=True):
            yield label(
                text, class_="muted number", x=self.x(tick), y=y, dy="1em", text_anchor="middle"
            )
        yield label(AXIS_NAME, class_="muted", x=WIDTH - MARGIN, y=y, dy="1em", text_anchor="end")


def frame_for(history: Sequence[EpochRecord], left: float, right: float) -> Frame:
    """Return the frame in which an epoch reaches from the one before it to its own number."""
    # A decision stands at the end of the epoch it was made on, where its effect begins.
    return Frame(Scale(history[0].epoch - 1, history[-1].epoch, left, right))


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
    kind = "mark cross" if op == "PRUNE" else "mark"
    shape = element("path", class_=kind, d=SHAPES.get(op, _OTHER))
    children = (tooltip(told), shape) if told else (shape,)
    place = f"translate({number(x)} {number(y)})"
    kind = "decision" if done else "decision refused"
    return element("g", *children, class_=kind, transform=place)


def draw_marks(
    decisions: Sequence[tuple[int, DecisionRecord]], frame: Frame, y: float
) -> Iterator[str]:
    """Draw the decisions of one slot along a line."""
    cells = grouped(
        ((decision.op, decision.outcome == "done", int(frame.x(epoch) / _CELL)), (epoch, decision))
        for epoch, decision in decisions
    )
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
    now = (slot.stage, slot.blueprint, begin)
    if last is None or (last.stage, last.blueprint, last.end) != now:
        runs.append(StageRun(slot.stage, slot.blueprint, begin, end, [(begin, end, alpha)]))
        return
    last.end = end
    since, _, before = last.steps[-1]
    if round(before, 3) == round(alpha, 3):
        last.steps[-1] = (since, end, before)
    else:
        last.steps.append((begin, end, alpha))


BAND = 46.0
"""Height of a band at alpha 1."""

_RIBBON_TOP = BAND + 2
_RIBBON = 7.0
_MARKS = _RIBBON_TOP + _RIBBON + 14
_MARKS_END = _MARKS + 11
_UNUSED = 12.0
_GAP = 14.0
_LABEL_ROWS = 4
_LABEL_LIFT = 7.0
_NAME_LENGTH = 40
_BLUEPRINT_LENGTH = 24
_NEVER = "never used"
# Many seeds end before they are measured, and a word for it would crowd out the numbers.
_NO_GAIN = "–"


def draw_lanes(lanes: Sequence[Lane], frame: Frame, top: float) -> tuple[list[str], float, int]:
    """Draw the lanes one below the other.

    Returns:
        The drawing, where it ends, and how many labels found no room.
    """
    drawing: list[str] = []
    left_out = 0
    for lane in lanes:
        draw = _draw_used if lane.runs or lane.decisions else _draw_unused
        parts, top, missing = draw(lane, frame, top)
        drawing.extend(parts)
        left_out += missing
    return drawing, top, left_out


def _draw_unused(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    band_top = top + ROW
    drawing = [*_background(frame, band_top, _UNUSED), _slot_name(lane, band_top)]
    if _name_end(lane) < frame.right - text_width(_NEVER) - 10:
        place = Placed(_NEVER, frame.right, "end", 0, frame.right)
        drawing.append(_draw_label(place, band_top - _LABEL_LIFT, "0", "muted"))
    return drawing, band_top + _UNUSED + _GAP, 0


def _draw_used(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    names, no_name = _place(
        [
            Wish(shortened(life.blueprint, _BLUEPRINT_LENGTH), frame.x(life.germinated), "start")
            for life in lane.lives
        ],
        taken=_name_end(lane),
    )
    gains, no_gain = _place(
        [Wish(_gain(life), frame.x(_last_epoch(life, frame)), "end") for life in lane.lives]
    )
    band_top = top + ROW * max(1, _rows(names))
    bottom = band_top + _MARKS_END
    drawing = [
        *_background(frame, band_top, BAND),
        *_alpha_scale(frame, band_top),
        *(_draw_run(lane.name, run, frame, band_top) for run in lane.runs),
        *draw_marks(lane.decisions, frame, band_top + _MARKS),
        # Lines before texts, so that a text in the way of a line stays readable.
        *(_leader(placed, band_top, band_top - placed.row * ROW) for placed in names),
        *(_leader(placed, bottom, bottom + placed.row * ROW) for placed in gains),
        _slot_name(lane, band_top),
    ]
    for placed in names:
        drawing.append(_draw_label(placed, band_top - _LABEL_LIFT - placed.row * ROW, "0"))
    for placed in gains:
        y = bottom + placed.row * ROW
        drawing.append(_draw_label(placed, y, ".95em", "number muted"))
    return drawing, bottom + _rows(gains) * ROW + _GAP, no_name + no_gain


def _background(frame: Frame, top: float, height: float) -> Iterator[str]:
    yield rectangle("well", frame.left, top, frame.right - frame.left, height)
    yield from frame.gridlines(top, top + height)


def _slot_name(lane: Lane, band_top: float) -> str:
    return element(
        "text",
        tooltip(f"slot {visible(lane.name)}"),
        escaped(shortened(lane.name, _NAME_LENGTH)),
        class_="strong halo",
        x=MARGIN,
        y=band_top - _LABEL_LIFT,
    )


def _name_end(lane: Lane) -> float:
    return MARGIN + text_width(shortened(lane.name, _NAME_LENGTH), is_strong=True)


def _place(wishes: Sequence[Wish], taken: float = 0.0) -> tuple[list[Placed], int]:
    return place_labels(wishes, left=MARGIN, right=WIDTH - MARGIN, rows=_LABEL_ROWS, taken=taken)


def _rows(placed: Sequence[Placed]) -> int:
    return 1 + max((one.row for one in placed), default=-1)


def _draw_run(slot: str, run: StageRun, frame: Frame, top: float) -> str:
    kind = STAGE_CLASSES.get(run.stage, "cooldown")
    x, width = frame.x(run.begin), frame.x(run.end) - frame.x(run.begin)
    parts = [tooltip(_tell_run(slot, run))]
    ribbon = top + _RIBBON_TOP
    if kind == "cooldown":
        parts.append(rectangle(kind, x + 1, ribbon + 1, max(width - 2, 0.5), _RIBBON - 2))
        return element("g", *parts, class_="run")
    parts.append(rectangle(f"tint {kind}", x, top, width, BAND))
    for begin, end, alpha in run.steps:
        if alpha > 0:
            left, height = frame.x(begin), alpha * BAND
            across = frame.x(end) - left
            parts.append(rectangle(f"alpha {kind}", left, top + BAND - height, across, height))
    parts.append(rectangle(f"ribbon {kind}", x, ribbon, width, _RIBBON))
    return element("g", *parts, class_="run")


def _alpha_scale(frame: Frame, top: float) -> Iterator[str]:
    for text, y, dy in ((LANE_SCALE, top, ".8em"), ("0", top + BAND, "0")):
        yield label(text, class_="muted number", x=frame.left - 8, y=y, dy=dy, text_anchor="end")


def _draw_label(placed: Placed, y: float, dy: str, kind: str = "") -> str:
    kind = f"halo {kind}".strip()
    return label(placed.text, class_=kind, x=placed.x, y=y, dy=dy, text_anchor=placed.anchor)


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


def _leader(placed: Placed, start: float, end: float) -> str:
    """Draw the line from a life to a label that had to move away from it."""
    if placed.row == 0:
        return ""
    x = placed.wished
    return element("line", class_="leader", x1=x, x2=x, y1=start, y2=end)


def _gain(life: SeedRecord) -> str:
    text = format_contribution(life.contribution, life.contribution_se)
    return _NO_GAIN if text == NOT_MEASURED else text


def _last_epoch(life: SeedRecord, frame: Frame) -> float:
    # A fossilized seed has come to the end of its development, but it is there until the end.
    if life.fate == "pruned" and life.ended is not None:
        return float(life.ended)
    return frame.x.high
