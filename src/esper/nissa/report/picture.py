"""The picture of a growing run: the score over the epochs, and what happened at every slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from esper.leyline.reasons import is_loss
from esper.leyline.records import EpochRecord, ModuleRecord, SlotRecord, seed_records
from esper.nissa.report.chart import Point, draw_path, known_points, make_point
from esper.nissa.report.lanes import (
    AXIS_NAME,
    LANE_SCALE,
    Frame,
    draw_slots,
    frame_for,
    read_lanes,
)
from esper.nissa.report.markup import (
    Scale,
    counted,
    describe_seed,
    element,
    format_count,
    format_number,
    label,
    rectangle,
    round_ticks,
    shortened,
    text_width,
    tick_labels,
    tooltip,
    visible,
)
from esper.nissa.report.page import FONT, MARGIN, ROW, STAGE_CLASSES, WIDTH, draw_svg
from esper.nissa.report.stacks import describe_lane, draw_compute, draw_stacks, read_stacks

# ---- The network: its host as a chain of modules, beside it the seeds in the slots


TITLE = "The network and what grew in it"
MOST_BOXES = 40
"""Boxes drawn at most; a longer chain keeps modules with slots and its ends."""

_LEFT = 350.0
_GAP = 46.0
_RIGHT = WIDTH - 2 * MARGIN - _LEFT - _GAP
_PAD = 10.0
_ARROW = 26.0
# What fits into a box at the largest size.
_CHARACTERS = int((_LEFT - 3 * _PAD) / (0.61 * FONT))
_SEED_CHARACTERS = int((_RIGHT - 3 * _PAD) / (0.61 * FONT))


@dataclass(frozen=True, slots=True)
class _Row:
    """One box of the chain; without a module it stands for several that are not drawn."""

    module: ModuleRecord | None
    parameters: int
    count: int = 1


def draw_architecture(
    modules: Sequence[ModuleRecord], slots: Sequence[SlotRecord], *, is_file: bool
) -> str:
    """Draw a host and its slots as an SVG, for a file of its own or for inside a page.

    Modules that have neither parameters nor a slot are left out.
    """
    living = {slot.name: slot for slot in slots}
    drawing: list[str] = []
    top = MARGIN
    rows = list(_rows(modules))
    for number, row in enumerate(rows):
        if number:
            drawing.append(_arrow(MARGIN + _LEFT / 2, top, _ARROW))
            top += _ARROW
        box, height = _draw_row(row, living, top)
        drawing.extend(box)
        top += height
    height = top + MARGIN
    description = describe_architecture(modules, slots)
    return draw_svg(TITLE, description, drawing, height, is_file=is_file)


def describe_architecture(modules: Sequence[ModuleRecord], slots: Sequence[SlotRecord]) -> str:
    """Return a description of the drawing, for screen readers."""
    living = {slot.name: slot for slot in slots}
    shown = [module for module in modules if module.parameters or module.slots]
    total = sum(module.parameters for module in modules)
    parts = [
        f"A host of {counted(len(shown), 'module')} with {counted(total, 'parameter')}, "
        "in the order in which they are called."
    ]
    for module in shown[: 2 * MOST_BOXES]:
        words = f"{visible(module.path)}: {counted(module.parameters, 'parameter')}"
        for name in module.slots:
            words += f"; slot {visible(name)} {' '.join(_seed_words(living.get(name)))}"
        parts.append(f"{words}.")
    return " ".join(parts)


def _rows(modules: Sequence[ModuleRecord]) -> Iterator[_Row]:
    shown = [module for module in modules if module.parameters or module.slots]
    room = MOST_BOXES - sum(bool(module.slots) for module in shown)
    plain = [index for index, module in enumerate(shown) if not module.slots]
    half = max(room, 2) // 2
    kept = set(plain if len(plain) <= room else (*plain[:half], *plain[-half:]))
    hidden: list[ModuleRecord] = []
    with_slot = 0
    for index, module in enumerate(shown):
        with_slot += bool(module.slots)
        if index in kept or (module.slots and with_slot <= MOST_BOXES):
            if hidden:
                yield _merged(hidden)
                hidden = []
            yield _Row(module, module.parameters)
        else:
            hidden.append(module)
    if hidden:
        yield _merged(hidden)


def _merged(modules: Sequence[ModuleRecord]) -> _Row:
    return _Row(None, sum(module.parameters for module in modules), len(modules))


def _draw_row(row: _Row, living: Mapping[str, SlotRecord], top: float) -> tuple[list[str], float]:
    module = row.module
    if module is None:
        lines = [f"{counted(row.count, 'module')} not drawn", _parameters(row.parameters)]
        return _box(MARGIN, top, _LEFT, lines, class_="part hidden", tip=", ".join(lines))
    lines = [
        shortened(module.path, _CHARACTERS),
        shortened(module.kind, _CHARACTERS),
        _parameters(module.parameters),
    ]
    text = f"{visible(module.path)}, {visible(module.kind)}, {_parameters(module.parameters)}"
    if module.shape is not None:
        size = " × ".join(map(str, module.shape)) or "1"
        text += f", puts out {size} for one sample"
        lines[1] = shortened(f"{module.kind} → {size}", _CHARACTERS)
    drawn: list[str] = []
    below = 0.0
    for name in module.slots:
        seed = living.get(name)
        words = _seed_words(seed)
        texts = [shortened(f"{name}: {words[0]}", _SEED_CHARACTERS), *words[1:]]
        stage = "" if seed is None else STAGE_CLASSES.get(seed.stage, "")
        x = MARGIN + _LEFT + _GAP
        box, height = _box(
            x,
            top + below,
            _RIGHT,
            texts,
            class_="part seed" if stage else "part empty",
            tip=f"slot {visible(name)}, {', '.join(words)}",
            stripe=stage,
        )
        middle = top + below + min(height, 3 * ROW + 2 * _PAD) / 2
        drawn.append(element("line", class_="axis", x1=x - _GAP, x2=x, y1=middle, y2=middle))
        drawn.extend(box)
        below += height + _PAD
    host, height = _box(MARGIN, top, _LEFT, lines, class_="part", tip=text, least=below - _PAD)
    return [*host, *drawn], height


def _seed_words(seed: SlotRecord | None) -> list[str]:
    stage = "" if seed is None else STAGE_CLASSES.get(seed.stage, "")
    if seed is None or not stage or seed.blueprint is None:
        return ["empty"]
    if stage == "cooldown":
        return ["empty", "cooling down"]
    alpha = format_number(seed.alpha, decimals=2)
    return [visible(seed.blueprint), f"{stage}, alpha {alpha}", _parameters(seed.parameters)]


def _parameters(count: int) -> str:
    return f"{format_count(count)} parameter{'' if count == 1 else 's'}"


def _box(
    x: float,
    y: float,
    width: float,
    lines: Sequence[str],
    *,
    class_: str,
    tip: str,
    stripe: str = "",
    least: float = 0.0,
) -> tuple[list[str], float]:
    height = max(len(lines) * ROW + 2 * _PAD, least)
    inside = [tooltip(tip), rectangle(class_, x, y, width, height, rx=6)]
    if stripe:
        inside.append(rectangle(stripe, x + 4, y + 6, 6, height - 12, rx=2))
    for number, line in enumerate(lines):
        kind, middle = "muted number" if number else "strong", y + _PAD + (number + 0.5) * ROW
        inside.append(label(line, class_=kind, x=x + 1.8 * _PAD, y=middle, dy=".35em"))
    return [element("g", *inside)], height


def _arrow(x: float, y: float, length: float) -> str:
    end = y + length - 2
    return element("path", class_="arrow", d=f"M{x:.0f} {y + 2:.0f}V{end:.0f}m-5 -6l5 6l5 -6")


HEIGHT = 280.0
_TICKS = 6
# The last number of the axis reaches this far into the room beside it.
_TICK_HALF = 30.0
_MOST_COLUMNS = 400


@dataclass(frozen=True, slots=True)
class Curves:
    """The score curves of a run, and the scale of their axis."""

    grown: list[Point | None]
    twin: list[Point | None]
    low: float
    high: float
    ticks: list[float]

    @property
    def unit(self) -> str:
        """Unit of the scores, in words."""
        scores = [score for _, score in known_points(self.grown)]
        return "the loss, negative" if any(map(is_loss, scores)) else "in points"

    @property
    def has_twin(self) -> bool:
        """Whether there is a twin."""
        return any(self.twin)

    def left_room(self) -> float:
        """Return the width of the numbers on the axis."""
        texts = (LANE_SCALE, *tick_labels(self.ticks))
        return max(text_width(text, FONT) for text in texts) + 10

    def right_room(self) -> float:
        """Return the width of the names of the curves."""
        names = max(text_width(line, FONT, is_strong=True) for line in self._ends())
        return max(names + 14, text_width(AXIS_NAME, FONT) + _TICK_HALF)

    def _ends(self) -> list[str]:
        ends = [curve[-1] for curve in map(known_points, (self.grown, self.twin)) if curve]
        return ["grown", *(format_number(score) for _, score in ends)]


def read_curves(history: Sequence[EpochRecord]) -> Curves:
    """Return the curves of a run; an epoch without a finite score is a gap."""
    grown = [make_point(record.epoch, record.val_score) for record in history]
    twin = [make_point(record.epoch, record.twin_score) for record in history]
    scores = [score for _, score in known_points(grown) + known_points(twin)] or [0.0]
    low, high = min(scores), max(scores)
    pad = (high - low) * 0.06
    if pad <= 1e-9 * max(abs(low), abs(high)):
        pad = max(abs(high) * 0.05, 0.5)
    low, high = low - pad, high + pad
    return Curves(grown, twin, low, high, round_ticks(low, high, _TICKS))


def draw_caption(curves: Curves, top: float) -> str:
    """Draw the caption of the panel."""
    text = f"Validation score, {curves.unit}"
    return label(text, class_="strong", x=MARGIN, y=top, dy=".9em")


def draw_curves(
    history: Sequence[EpochRecord], curves: Curves, frame: Frame, top: float
) -> Iterator[str]:
    """Draw the panel with its upper edge at `top`."""
    y = Scale(curves.low, curves.high, top + HEIGHT, top)
    yield from frame.gridlines(top, top + HEIGHT)
    for tick, text in zip(curves.ticks, tick_labels(curves.ticks), strict=True):
        height = y(tick)
        yield element("line", class_="grid", x1=frame.left, x2=frame.right, y1=height, y2=height)
        x = frame.left - 8
        yield label(text, class_="muted number", x=x, y=height, dy=".35em", text_anchor="end")
    yield from frame.axis(top + HEIGHT)
    if curves.has_twin:
        yield draw_path("curve twin", curves.twin, frame.x, y)
    if known_points(curves.grown):
        yield draw_path("curve grown", curves.grown, frame.x, y)
    else:
        middle = (frame.left + frame.right) / 2
        yield label(
            "no finite score", class_="muted", x=middle, y=top + HEIGHT / 2, text_anchor="middle"
        )
    yield from _names(curves, frame, y, top)
    yield from _columns(history, frame, top)


def _names(curves: Curves, frame: Frame, y: Scale, top: float) -> Iterator[str]:
    """Draw each curve's name and last value at its end, without overlap."""
    ends = []
    for name, curve in (("grown", curves.grown), ("twin", curves.twin)):
        points = known_points(curve)
        if points:
            epoch, score = points[-1]
            title = name if curves.has_twin else "score"
            ends.append((y(score), frame.x(epoch), name, title, score))
    ends.sort()
    block = 1.9 * ROW
    heights = [height for height, *_ in ends]
    if len(ends) == 2 and heights[1] - heights[0] < block:
        middle = min(max(sum(heights) / 2, top + block / 2), top + HEIGHT - block)
        heights = [middle - block / 2, middle + block / 2]
    for height, (exact, x, name, title, score) in zip(heights, ends, strict=True):
        yield element("circle", class_=f"end {name}", cx=x, cy=exact, r=4.5)
        at = frame.right + 12
        # Both lines are placed in units of the font, so they stay together at every size.
        yield element(
            "text",
            element("tspan", title, x=at, dy="-.15em"),
            element("tspan", format_number(score), x=at, dy="1.1em", class_="number"),
            class_=f"strong {name}",
            y=min(max(height, top), top + HEIGHT - ROW / 2),
        )


def _columns(history: Sequence[EpochRecord], frame: Frame, top: float) -> Iterator[str]:
    """Draw an invisible column over every epoch, with its values as tooltip."""
    if len(history) > _MOST_COLUMNS:
        return
    half = (frame.right - frame.left) / (frame.x.high - frame.x.low) / 2
    for record in history:
        x = frame.x(record.epoch)
        begin, end = max(x - half, frame.left), min(x + half, frame.right)
        text = f"epoch {record.epoch}: score {format_number(record.val_score)}"
        if record.twin_score is not None:
            text += f", twin {format_number(record.twin_score)}"
        yield rectangle("column", begin, top, end - begin, HEIGHT, tooltip(text))


DEFAULT_TITLE = "Score and slots over the epochs"

_TITLE_LENGTH = 54
_MOST_SEEDS = 40


def growth_picture(history: Sequence[EpochRecord], *, title: str = DEFAULT_TITLE) -> str:
    """Draw a growing run as one self-contained SVG.

    The upper panel is the learning curve, with that of the twin dashed. Below, each slot has a
    lane: the colour is the stage, the height of the solid band is alpha, marks are decisions. A
    network that was deepened has a lane per stack of blocks instead, and its training FLOPs. The
    same history gives the same text, byte for byte.

    Args:
        history: The epochs of the run, in order.
        title: The title of the picture.
    """
    return draw_picture(history, title=title, is_file=True)


def draw_picture(history: Sequence[EpochRecord], *, title: str, is_file: bool) -> str:
    """Draw a run as an SVG for a file of its own or, without a namespace, for inside a page."""
    if not history:
        drawing, height = _draw_nothing()
    else:
        drawing, height = _draw_run(history)
    heading = label(
        shortened(title, _TITLE_LENGTH), class_="strong", x=MARGIN, y=MARGIN, dy=".95em"
    )
    return draw_svg(title, describe(history), [heading, *drawing], height, is_file=is_file)


def describe(history: Sequence[EpochRecord]) -> str:
    """Return a description of the picture, for screen readers."""
    if not history:
        return "No epochs were recorded."
    first, last = history[0], history[-1]
    unit = " (the negative loss)" if is_loss(last.val_score) else " points"
    twin = ""
    if last.twin_score is not None:
        which = "which only waits" if last.depth is None else "whose blocks are all awake"
        twin = f", that of the twin, {which}, to {format_number(last.twin_score)}"
    parts = [
        f"{counted(len(history), 'epoch')}. The validation score goes from "
        f"{format_number(first.val_score)} to {format_number(last.val_score)}{unit}" + f"{twin}."
    ]
    stacks = read_stacks(history)
    if stacks:
        return " ".join([*parts, *map(describe_lane, stacks)])
    lives = seed_records(history)
    parts.extend(describe_seed(life) for life in lives[:_MOST_SEEDS])
    if not lives:
        parts.append("No seed was germinated.")
    elif len(lives) > _MOST_SEEDS:
        parts.append(f"And {len(lives) - _MOST_SEEDS} more seeds.")
    return " ".join(parts)


def _draw_run(history: Sequence[EpochRecord]) -> tuple[list[str], float]:
    curves = read_curves(history)
    frame = frame_for(history, MARGIN + curves.left_room(), WIDTH - MARGIN - curves.right_room())
    top = MARGIN + ROW + 12
    drawing = [draw_caption(curves, top)]
    top += ROW + 10
    drawing.extend(draw_curves(history, curves, frame, top))
    top += HEIGHT + ROW + 26

    stacks = read_stacks(history)
    if stacks:
        text = "Stacks: a bar for each block that is awake"
        drawing.append(label(text, class_="strong", x=MARGIN, y=top, dy=".9em"))
        lanes, top = draw_stacks(stacks, frame, top + ROW + 4)
        drawing.extend([*lanes, *frame.axis(top)])
        compute, top = draw_compute(history, frame, top + ROW + 26)
        return [*drawing, *compute], top + MARGIN
    text = "Slots: colour is the stage, height is how far a seed is blended in (alpha)"
    drawing.append(label(text, class_="strong", x=MARGIN, y=top, dy=".9em"))
    lanes, top = draw_slots(read_lanes(history, seed_records(history)), frame, top + ROW + 4)
    return [*drawing, *lanes], top + MARGIN


def _draw_nothing() -> tuple[list[str], float]:
    text = label(
        "No epochs were recorded yet.", class_="muted", x=WIDTH / 2, y=100, text_anchor="middle"
    )
    return [text], 160.0
