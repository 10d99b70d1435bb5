"""The upper panel: the validation score over the epochs, beside the twin's where one ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from esper.leyline.records import EpochRecord, is_loss
from esper.report.chart import Point, draw_path, known_points, make_point
from esper.report.frame import AXIS_NAME, LANE_SCALE, Frame
from esper.report.labels import text_width
from esper.report.markup import (
    Scale,
    element,
    format_number,
    label,
    round_ticks,
    tick_labels,
    tooltip,
)
from esper.report.style import MARGIN, ROW

HEIGHT = 280.0
_TICKS = 6
# The last number of the axis reaches this far into the room beside it.
_TICK_HALF = 30.0
_MOST_COLUMNS = 400


@dataclass(frozen=True, slots=True)
class Curves:
    """What the panel draws: the scores, the twin's, and the values named on the axis."""

    grown: list[Point | None]
    twin: list[Point | None]
    low: float
    high: float
    ticks: list[float]

    @property
    def unit(self) -> str:
        """What the scores are."""
        scores = [score for _, score in known_points(self.grown)]
        return "the loss, negative" if any(map(is_loss, scores)) else "in points"

    @property
    def has_twin(self) -> bool:
        """Whether any epoch has a score of the twin."""
        return any(self.twin)

    def left_room(self) -> float:
        """Return the room the numbers of the axis need."""
        texts = (LANE_SCALE, *tick_labels(self.ticks))
        return max(text_width(text) for text in texts) + 10

    def right_room(self) -> float:
        """Return the room the names of the curves need."""
        names = max(text_width(line, is_strong=True) for line in self._ends())
        return max(names + 14, text_width(AXIS_NAME) + _TICK_HALF)

    def _ends(self) -> list[str]:
        ends = [curve[-1] for curve in map(known_points, (self.grown, self.twin)) if curve]
        return ["grown", *(format_number(score) for _, score in ends)]


def read_curves(history: Sequence[EpochRecord]) -> Curves:
    """Return the curves of a run; an epoch without a usable score is a gap."""
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
    """Say what the panel shows, in a row above it."""
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
        yield label(
            text,
            class_="muted number",
            x=frame.left - 8,
            y=height,
            dy=".35em",
            text_anchor="end",
        )
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
    """Write each curve's name and last value at its end, apart where the ends are close."""
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
    """Lay an invisible column over every epoch that tells its numbers."""
    if len(history) > _MOST_COLUMNS:
        return
    half = (frame.right - frame.left) / (frame.x.high - frame.x.low) / 2
    for record in history:
        x = frame.x(record.epoch)
        begin, end = max(x - half, frame.left), min(x + half, frame.right)
        told = f"epoch {record.epoch}: score {format_number(record.val_score)}"
        if record.twin_score is not None:
            told += f", twin {format_number(record.twin_score)}"
        yield element(
            "rect",
            tooltip(told),
            class_="column",
            x=begin,
            y=top,
            width=end - begin,
            height=HEIGHT,
        )
