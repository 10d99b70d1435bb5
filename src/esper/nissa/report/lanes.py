"""Draws what happened at every slot: one lane each, stages as colours, alpha as height.

Decisions are marks below the lane. The report and the live page use the same drawing; a `Frame`
says how wide it is, which epochs it shows and how large its texts may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    SeedRecord,
    SlotRecord,
    decisions_of,
)
from esper.leyline.stages import EMPTY_STAGES
from esper.nissa.report.markup import (
    NOT_MEASURED,
    Label,
    Scale,
    counted,
    describe_decision,
    describe_seed,
    element,
    escaped,
    format_contribution,
    format_number,
    label,
    number,
    op_words,
    place_labels,
    rectangle,
    round_ticks,
    shortened,
    text_width,
    tick_labels,
    tooltip,
    visible,
)
from esper.nissa.report.page import FONT, LEGEND_STAGES, MARGIN, ROW, STAGE_CLASSES, WIDTH
from esper.utils.process import grouped

# ---- Epochs along the width


AXIS_NAME = "epoch"
LANE_SCALE = "α 1"
"""The upper end of a lane, named in the room left of it."""

# Room for a number on the axis, in units of its size.
_TICK_ROOM = 78.0 / FONT


@dataclass(frozen=True, slots=True)
class Frame:
    """Which epochs a drawing shows, where, and how large its texts may be."""

    x: Scale
    """From epochs to coordinates."""
    width: float = WIDTH
    """Width of the whole drawing."""
    font: float = FONT
    """The largest size of its texts."""

    @property
    def left(self) -> float:
        """Where the first epoch begins."""
        return self.x.start

    @property
    def right(self) -> float:
        """Where the last epoch ends."""
        return self.x.end

    @property
    def row(self) -> float:
        """Height of a line of text."""
        return self.font * ROW / FONT

    def at(self, epoch: float) -> float:
        """Return the coordinate of an epoch; one that is not shown lies at the nearest edge."""
        return self.x(min(max(epoch, self.x.low), self.x.high))

    def shows(self, epoch: float) -> bool:
        """Return whether an epoch lies within the drawing."""
        return self.x.low <= epoch <= self.x.high

    def text_width(self, text: str, *, is_strong: bool = False) -> float:
        """Return the room a text needs."""
        return text_width(text, self.font, is_strong=is_strong)

    def ticks(self) -> list[float]:
        """Return the epochs that are named on the axis."""
        room = max(2, int((self.right - self.left) / (_TICK_ROOM * self.font)))
        return round_ticks(self.x.low, self.x.high, room, whole=True)

    def gridlines(self, top: float, bottom: float) -> Iterator[str]:
        """Draw a fine line at every tick."""
        for tick in self.ticks():
            x = self.x(tick)
            yield element("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom)

    def axis(self, top: float) -> Iterator[str]:
        """Draw the axis with its numbers below it, and its name where there is room."""
        yield element("line", class_="axis", x1=self.left, x2=self.right, y1=top, y2=top)
        ticks, y = self.ticks(), top + 5
        for tick, text in zip(ticks, tick_labels(ticks), strict=True):
            yield label(
                text, class_="muted number", x=self.x(tick), y=y, dy="1em", text_anchor="middle"
            )
        has_room = self.width - self.right > self.text_width(AXIS_NAME)
        x, anchor = (self.width - MARGIN, "end") if has_room else (MARGIN, "start")
        yield label(AXIS_NAME, class_="muted", x=x, y=y, dy="1em", text_anchor=anchor)


def frame_for(history: Sequence[EpochRecord], left: float, right: float) -> Frame:
    """Return the frame in which an epoch reaches from the one before it to its own number."""
    # A decision stands at the end of the epoch it was made on, where its effect begins.
    return Frame(Scale(history[0].epoch - 1, history[-1].epoch, left, right))


# ---- Decisions as marks


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


def draw_mark(op: str, x: float, y: float, *, done: bool = True, tip: str = "") -> str:
    """Draw the mark of one decision around a point, with a tooltip."""
    kind = "mark cross" if op == "PRUNE" else "mark"
    shape = element("path", class_=kind, d=SHAPES.get(op, _OTHER))
    children = (tooltip(tip), shape) if tip else (shape,)
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
        if frame.shows(epoch)
    )
    for (op, done, _), members in cells.items():
        epoch, decision = members[0]
        tip = describe_decision(epoch, decision)
        if len(members) > 1:
            tip += f" (and {len(members) - 1} more like it up to epoch {members[-1][0]})"
        yield draw_mark(op, frame.x(epoch), y, done=done, tip=tip)


# ---- What happened at each slot


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
    """One slot: its stages, its seeds, the decisions about it."""

    name: str
    runs: list[StageRun] = field(default_factory=list)
    seeds: list[tuple[int, SeedRecord]] = field(default_factory=list)
    """Its seeds, each with its number among all seeds of the network."""
    decisions: list[tuple[int, DecisionRecord]] = field(default_factory=list)


def read_lanes(history: Sequence[EpochRecord], seeds: Sequence[SeedRecord]) -> list[Lane]:
    """Return a lane for every slot of a network, in order of appearance.

    Args:
        history: The epochs to draw, at least one.
        seeds: All seeds of the network, in order of germination.
    """
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
    for ordinal, seed in enumerate(seeds):
        lanes.setdefault(seed.slot, Lane(seed.slot)).seeds.append((ordinal, seed))
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


# ---- The drawing


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


def draw_slots(
    lanes: Sequence[Lane], frame: Frame, top: float, *, is_live: bool = False
) -> tuple[list[str], float]:
    """Draw the legend, the lanes and their axis; return the drawing and where it ends.

    Args:
        lanes: One per slot; those without a seed are left out first where there are too many.
        frame: The epochs along the width.
        top: Upper edge.
        is_live: Whether a script on the page opens a seed that is clicked.
    """
    drawing, top = draw_legend(frame, top)
    top += 14
    chosen = list(lanes)
    if len(chosen) > MOST_LANES:
        kept = sorted(chosen, key=lambda lane: not lane.seeds)[:MOST_LANES]
        chosen = [lane for lane in chosen if lane in kept]
    left_out = 0
    for lane in chosen:
        if lane.runs or lane.decisions:
            parts, top, missing = _draw_used(lane, frame, top, is_live)
        else:
            parts, top, missing = _draw_unused(lane, frame, top)
        drawing.extend(parts)
        left_out += missing
    drawing.extend(frame.axis(top))
    top += frame.row + 8
    notes = [f"{counted(left_out, 'label')} found no room"] if left_out else []
    if len(lanes) > len(chosen):
        notes.append(f"{counted(len(lanes) - len(chosen), 'slot')} not drawn")
    for note in notes:
        drawing.append(label(note, class_="muted", x=MARGIN, y=top, dy="1em"))
        top += frame.row + 4
    return drawing, top


_SYMBOL = 26.0
# Room for a symbol and the longest name, in units of the text size.
_LEGEND_COLUMN = 10.8
_REFUSED = "hollow: refused"

Draw = Callable[[float, float], str]


def draw_legend(frame: Frame, top: float) -> tuple[list[str], float]:
    """Draw the legend from `top` on; return the drawing and where it ends."""
    stages = [(stage, partial(_swatch, stage)) for stage in LEGEND_STAGES]
    marks: list[tuple[str, Draw]] = [(op_words(op), partial(draw_mark, op)) for op in SHAPES]
    marks.append((_REFUSED, partial(draw_mark, "ADVANCE", done=False)))
    drawing, bottom = _set_in_columns(stages, frame, top)
    more, bottom = _set_in_columns(marks, frame, bottom + 4)
    return drawing + more, bottom


def _set_in_columns(
    entries: Sequence[tuple[str, Draw]], frame: Frame, top: float
) -> tuple[list[str], float]:
    drawing: list[str] = []
    room = frame.width - 2 * MARGIN
    columns = max(1, int(room / (_LEGEND_COLUMN * frame.font)))
    for index, (text, draw) in enumerate(entries):
        row, column = divmod(index, columns)
        x = MARGIN + column * room / columns
        y = top + (row + 0.5) * frame.row
        drawing.append(draw(x + 9, y))
        drawing.append(label(text, x=x + _SYMBOL, y=y, dy=".35em"))
    return drawing, top + math.ceil(len(entries) / columns) * frame.row


def _swatch(stage: str, x: float, y: float) -> str:
    return rectangle(stage, x - 8, y - 8, 17, 17)


def _draw_unused(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    band_top = top + frame.row
    drawing = [*_background(frame, band_top, _UNUSED), _slot_name(lane, band_top)]
    if _name_end(lane, frame) < frame.right - frame.text_width(_NEVER) - 10:
        place = Label(_NEVER, frame.right, "end")
        drawing.append(_draw_label(place, band_top - _LABEL_LIFT, "0", "muted"))
    return drawing, band_top + _UNUSED + _GAP, 0


def _draw_used(lane: Lane, frame: Frame, top: float, is_live: bool) -> tuple[list[str], float, int]:
    shown = [
        (ordinal, seed)
        for ordinal, seed in lane.seeds
        if seed.germinated <= frame.x.high and _last_epoch(seed, frame) >= frame.x.low
    ]
    names, no_name = _place(
        frame,
        [
            Label(shortened(seed.blueprint, _BLUEPRINT_LENGTH), frame.at(seed.germinated), "start")
            for _, seed in shown
        ],
        taken=_name_end(lane, frame),
    )
    gains, no_gain = _place(
        frame, [Label(_gain(seed), frame.at(_last_epoch(seed, frame)), "end") for _, seed in shown]
    )
    row = frame.row
    band_top = top + row * max(1, _rows(names))
    bottom = band_top + _MARKS_END
    drawing = [
        *_background(frame, band_top, BAND),
        *_alpha_scale(frame, band_top),
        *(_draw_run(lane.name, run, frame, band_top) for run in lane.runs),
        *(_draw_button(*seed, frame, band_top) for seed in shown if is_live),
        *draw_marks(lane.decisions, frame, band_top + _MARKS),
        # Lines before texts, so that a text in the way of a line stays readable.
        *(_leader(placed, band_top, band_top - placed.row * row) for placed in names),
        *(_leader(placed, bottom, bottom + placed.row * row) for placed in gains),
        _slot_name(lane, band_top),
    ]
    for placed in names:
        drawing.append(_draw_label(placed, band_top - _LABEL_LIFT - placed.row * row, "0"))
    for placed in gains:
        y = bottom + placed.row * row
        drawing.append(_draw_label(placed, y, ".95em", "number muted"))
    return drawing, bottom + _rows(gains) * row + _GAP, no_name + no_gain


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


def _name_end(lane: Lane, frame: Frame) -> float:
    return MARGIN + frame.text_width(shortened(lane.name, _NAME_LENGTH), is_strong=True)


def _place(frame: Frame, labels: Sequence[Label], taken: float = 0.0) -> tuple[list[Label], int]:
    right = frame.width - MARGIN
    return place_labels(
        labels, left=MARGIN, right=right, rows=_LABEL_ROWS, taken=taken, font=frame.font
    )


def _rows(placed: Sequence[Label]) -> int:
    return 1 + max((one.row for one in placed), default=-1)


def _draw_run(slot: str, run: StageRun, frame: Frame, top: float) -> str:
    kind = STAGE_CLASSES.get(run.stage, "cooldown")
    x, width = frame.at(run.begin), frame.at(run.end) - frame.at(run.begin)
    parts = [tooltip(_describe_run(slot, run))]
    ribbon = top + _RIBBON_TOP
    if kind == "cooldown":
        parts.append(rectangle(kind, x + 1, ribbon + 1, max(width - 2, 0.5), _RIBBON - 2))
        return element("g", *parts, class_="run")
    parts.append(rectangle(f"tint {kind}", x, top, width, BAND))
    for begin, end, alpha in run.steps:
        if alpha > 0:
            left, height = frame.at(begin), alpha * BAND
            across = frame.at(end) - left
            parts.append(rectangle(f"alpha {kind}", left, top + BAND - height, across, height))
    parts.append(rectangle(f"ribbon {kind}", x, ribbon, width, _RIBBON))
    return element("g", *parts, class_="run")


def _draw_button(ordinal: int, seed: SeedRecord, frame: Frame, top: float) -> str:
    """Draw an invisible rectangle over a seed's life; the live page opens the seed on a click."""
    x, end = frame.at(seed.germinated), frame.at(_last_epoch(seed, frame))
    text = describe_seed(seed)
    return element(
        "g",
        tooltip(text),
        rectangle("hit", x, top - 2, max(end - x, 8), BAND + 4, rx=4),
        class_="seed",
        role="button",
        tabindex=0,
        data_seed=ordinal,
        aria_label=visible(f"{text} Opens its life.", limit=1000),
    )


def _alpha_scale(frame: Frame, top: float) -> Iterator[str]:
    for text, y, dy in ((LANE_SCALE, top, ".8em"), ("0", top + BAND, "0")):
        yield label(text, class_="muted number", x=frame.left - 8, y=y, dy=dy, text_anchor="end")


def _draw_label(placed: Label, y: float, dy: str, kind: str = "") -> str:
    kind = f"halo {kind}".strip()
    return label(placed.text, class_=kind, x=placed.x, y=y, dy=dy, text_anchor=placed.anchor)


def _describe_run(slot: str, run: StageRun) -> str:
    first, last = run.begin + 1, run.end
    epochs = f"epoch {last:g}" if first >= last else f"epochs {first:g} to {last:g}"
    parts = [visible(run.stage).lower(), epochs]
    if run.blueprint is not None:
        parts.insert(0, visible(run.blueprint))
    if run.steps:
        alphas = [format_number(run.steps[index][2], decimals=2) for index in (0, -1)]
        parts.append(f"alpha {' to '.join(dict.fromkeys(alphas))}")
    return f"{visible(slot)}: {', '.join(parts)}"


def _leader(placed: Label, start: float, end: float) -> str:
    """Draw the line from a seed to a label that had to move away from it."""
    if placed.row == 0:
        return ""
    x = placed.wanted
    return element("line", class_="leader", x1=x, x2=x, y1=start, y2=end)


def _gain(seed: SeedRecord) -> str:
    text = format_contribution(seed.contribution, seed.contribution_se)
    return _NO_GAIN if text == NOT_MEASURED else text


def _last_epoch(seed: SeedRecord, frame: Frame) -> float:
    # A fossilized seed has come to the end of its development, but it is there until the end.
    if seed.fate == "pruned" and seed.ended is not None:
        return float(seed.ended)
    return frame.x.high
