"""Draws a panel as SVG: lines, and bands between percentiles, over rounds or epochs.

The live page draws the same panels with uPlot; a report needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from esper.leyline.reasons import round_number
from esper.leyline.records import copy_fields
from esper.nissa.report.markup import (
    Scale,
    element,
    escaped,
    format_measure,
    format_share,
    label,
    number,
    rectangle,
    round_ticks,
    tick_labels,
    tooltip,
    visible,
    width_in_em,
)
from esper.nissa.report.panels import Panel, Points
from esper.utils.process import grouped

MOST_POINTS = 1200

# A larger value is not drawn, because it would flatten everything else.
_OFF_THE_CHART = 1e15

T = TypeVar("T")

_AXIS_NAMES = {"step": "epoch"}

Point = tuple[float, float]
"""Position on the axis, and value."""


def make_point(at: float, value: float | None) -> Point | None:
    """Return a point, or None without a value that can be drawn."""
    # The comparison is false for NaN as well.
    if value is None or not abs(value) < _OFF_THE_CHART:
        return None
    return float(at), float(value)


def known_points(points: Sequence[Point | None]) -> list[Point]:
    """Return the points that are not None."""
    return [point for point in points if point is not None]


def draw_path(
    kind: str, points: Sequence[Point | None], x: Scale, y: Scale, *, most: int = MOST_POINTS
) -> str:
    """Draw a curve with a CSS class; a missing point is a gap."""
    steps: list[str] = []
    for run in _runs(points):
        pairs = [f"{number(x(at))} {number(y(value))}" for at, value in thin(run, most)]
        # A single point is drawn as a line of zero length with round ends.
        steps.append(f"M{'L'.join(pairs)}" + ("h0" if len(pairs) == 1 else ""))
    return element("path", class_=kind, d="".join(steps))


def draw_area(
    kind: str,
    low: Sequence[Point | None],
    high: Sequence[Point | None],
    x: Scale,
    y: Scale,
    *,
    most: int = MOST_POINTS,
) -> str:
    """Draw the area between two curves; a gap in either is a gap in the area."""
    both = [
        (under, over) if under is not None and over is not None else None
        for under, over in zip(low, high, strict=True)
    ]
    outlines: list[str] = []
    for run in _runs(both):
        if len(run) > most:
            run = run[:: math.ceil(len(run) / most)] + run[-1:]
        along = [f"{number(x(at))} {number(y(value))}" for _, (at, value) in run]
        back = [f"{number(x(at))} {number(y(value))}" for (at, value), _ in reversed(run)]
        if len(run) > 1:
            outlines.append(f"M{'L'.join(along + back)}Z")
    return element("path", class_=kind, d="".join(outlines))


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Keep the lowest and the highest of every few points if there are too many."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        kept.extend(sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}))
    return kept


def _runs(points: Sequence[T | None]) -> Iterator[list[T]]:
    """Yield the runs of points between gaps."""
    for _, run in groupby(points, lambda point: point is None):
        if found := [point for point in run if point is not None]:
            yield found


COLORS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
"""CSS classes of lines and bands, in order of use."""

_FONT = 15.5
"""The largest text size in the chart's units, for phones."""

_ROW = 18.0
_WIDTH = 460.0
_PLOT = 170.0
_TICKS = 5
_COLUMNS = 60
_MOST_POINTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[Point | None]
    kind: str = "c1"
    """Class of its colour, one of `COLORS`; `dashed` may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The area between two curves."""

    name: str
    low: Sequence[Point | None]
    high: Sequence[Point | None]
    kind: str = "c1 band"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Content of one chart."""

    title: str
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    """Drawn below the lines, in this order."""
    reference: float | None = None
    """A value that is marked by a line."""
    unit: str = ""
    axis: str = "round"
    """Name of the x axis."""
    is_share: bool = False
    """Whether values are shares, shown in percent."""
    floor: float | None = None
    """The axis reaches at least down to this."""
    ceiling: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        curves = [line.points for line in self.lines] + [band.high for band in self.bands]
        return not any(known_points(curve) for curve in curves)


def draw_chart(chart: Chart) -> str:
    """Draw a chart as an SVG for inside a page."""
    width, plot = _WIDTH, _PLOT
    low, high = _range(chart)
    ticks = round_ticks(low, high, _TICKS)
    texts = tick_labels(ticks)
    if chart.is_share:
        texts = [f"{text} %" for text in tick_labels([100 * tick for tick in ticks])]
    left = max(map(_width, texts), default=0.0) + 6
    legend, top = _draw_legend(chart, _ROW + 4)
    bottom = top + plot
    first, last = _span(chart)
    x = Scale(first, last, left, width - 8)
    y = Scale(low, high, bottom, top)
    parts = [
        tooltip(chart.title),
        element("desc", escaped(describe_chart(chart), limit=2000)),
        label(chart.title, class_="strong", x=2, y=1, dy=".95em"),
        label(chart.unit, class_="muted", x=width - 8, y=1, dy=".95em", text_anchor="end"),
        *legend,
        *_draw_grid(chart, ticks, texts, x, y),
    ]
    most = _MOST_POINTS
    parts += [draw_area(band.kind, band.low, band.high, x, y, most=most) for band in chart.bands]
    if chart.reference is not None and low <= chart.reference <= high:
        at = y(chart.reference)
        parts.append(element("line", class_="reference", x1=left, x2=x.end, y1=at, y2=at))
    parts += [draw_path(f"line {line.kind}", line.points, x, y, most=most) for line in chart.lines]
    parts += [*_draw_axis(chart, x, bottom), *_draw_columns(chart, x, top, plot)]
    height = bottom + _ROW + 2
    return element(
        "svg", *parts, class_="chart", role="img", viewBox=f"0 0 {width:.0f} {height:.0f}"
    )


def describe_chart(chart: Chart) -> str:
    """Return a description of a chart, for screen readers."""
    parts = []
    for line in chart.lines:
        points = known_points(line.points)
        if points:
            (begin, first), (end, last) = points[0], points[-1]
            parts.append(
                f"{line.name}: {value_text(chart, first)} in {chart.axis} {begin:.0f}, "
                f"{value_text(chart, last)} in {chart.axis} {end:.0f}"
            )
    for band in chart.bands:
        low, high = known_points(band.low), known_points(band.high)
        if low and high:
            parts.append(
                f"{band.name or 'between'}: {value_text(chart, low[-1][1])} to "
                f"{value_text(chart, high[-1][1])} in {chart.axis} {high[-1][0]:.0f}"
            )
    return "; ".join(parts) + "." if parts else "Nothing was measured."


def value_text(chart: Chart, value: float) -> str:
    """Return one value of a chart as text."""
    return format_share(value) if chart.is_share else format_measure(value)


def _range(chart: Chart) -> tuple[float, float]:
    values = [value for line in chart.lines for _, value in known_points(line.points)]
    for band in chart.bands:
        values += [value for curve in (band.low, band.high) for _, value in known_points(curve)]
    values += [value for value in (chart.floor, chart.ceiling) if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = (high - low) * 0.06
    if pad <= 1e-9 * max(abs(low), abs(high), 1e-12):
        # A constant curve has no scale of its own.
        pad = abs(high) * 0.1 or (0.05 if chart.is_share else 0.5)
    # A given end of the axis is kept: a share does not go below 0.
    low = low if chart.floor == low else low - pad
    return low, high if chart.ceiling == high else high + pad


def _span(chart: Chart) -> tuple[float, float]:
    places = [at for line in chart.lines for at, _ in known_points(line.points)]
    places += [at for band in chart.bands for at, _ in known_points(band.high)]
    first, last = min(places, default=0.0), max(places, default=1.0)
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _draw_legend(chart: Chart, top: float) -> tuple[list[str], float]:
    """Draw the legend; return it and where it ends."""
    named = [(line.name, f"line {line.kind}", line) for line in chart.lines]
    entries: list[tuple[str, str, Line | None]] = [*named]
    entries += [(band.name, band.kind, None) for band in chart.bands if band.name]
    if len(named) == 1 and len(entries) == 1:
        # The title names the only line, so its last value is enough.
        points = known_points(chart.lines[0].points)
        text = value_text(chart, points[-1][1]) if points else ""
        return [label(text, class_="strong c1", x=2, y=top - 2, dy=".9em")], top + _ROW + 5
    drawing: list[str] = []
    at, width = 2.0, _WIDTH
    for name, kind, line in entries:
        points = known_points(line.points) if line is not None else []
        text = f"{name} {value_text(chart, points[-1][1])}" if points else name
        needed = 22 + _width(text)
        if at > 2 and at + needed > width:
            at, top = 2.0, top + _ROW
        middle = top + _ROW / 2
        if line is None:
            drawing.append(rectangle(kind, at, middle - 5, 16, 10))
        else:
            drawing.append(element("path", class_=kind, d=f"M{at} {middle}h16"))
        drawing.append(label(text, class_="muted number", x=at + 20, y=middle, dy=".35em"))
        at += needed + 10
    return drawing, top + _ROW + 9


def _draw_grid(
    chart: Chart, ticks: Sequence[float], texts: Sequence[str], x: Scale, y: Scale
) -> Iterator[str]:
    for tick, text in zip(ticks, texts, strict=True):
        at = y(tick)
        yield element("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at)
        yield label(text, class_="muted number", x=x.start - 5, y=at, dy=".35em", text_anchor="end")


def _draw_axis(chart: Chart, x: Scale, top: float) -> Iterator[str]:
    yield element("line", class_="axis", x1=x.start, x2=x.end, y1=top, y2=top)
    ticks = [tick for tick in round_ticks(x.low, x.high, 6, whole=True) if x.low <= tick]
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        half = _width(text) / 2
        at = min(max(x(tick), x.start + half), x.end - half + 6)
        yield label(text, class_="muted number", x=at, y=top + 4, dy="1em", text_anchor="middle")


def _draw_columns(chart: Chart, x: Scale, top: float, height: float) -> Iterator[str]:
    """Draw invisible columns over the plot, with the values in their middle as tooltips."""
    values: dict[float, list[str]] = {}
    for line in chart.lines:
        for at, value in known_points(line.points):
            values.setdefault(at, []).append(f"{line.name} {value_text(chart, value)}")
    for band in chart.bands:
        for low, high in zip(band.low, band.high, strict=True):
            if low is not None and high is not None:
                text = f"{value_text(chart, low[1])} to {value_text(chart, high[1])}"
                values.setdefault(high[0], []).append(f"{band.name or 'between'} {text}")
    places = sorted(values)
    size = max(1, math.ceil(len(places) / _COLUMNS))
    chosen = places[size // 2 :: size]
    width = (x.end - x.start) / max(1, len(chosen))
    for at in chosen:
        begin = min(max(x(at) - width / 2, x.start), x.end - width)
        text = f"{chart.axis} {at:.0f}: {', '.join(values[at])}"
        yield rectangle("column", begin, top, width, height, tooltip(text))


def _width(text: str) -> float:
    return width_in_em(text) * _FONT


# ------------------------------------------------------------------------------- from panels


def draw_panels(panels: Iterable[Panel], tables: Mapping[str, Points]) -> str:
    """Return a grid of charts without the empty ones."""
    charts = [chart_of(panel, tables[panel.table]) for panel in panels if panel.table in tables]
    drawn = [draw_chart(chart) for chart in charts if not chart.is_empty]
    body = "".join(f"<div>{picture}</div>\n" for picture in drawn)
    return f'<div class="charts">\n{body}</div>\n' if drawn else ""


def chart_of(panel: Panel, points: Points) -> Chart:
    """Return a panel with its points, ready to be drawn."""
    rows = sorted(points["rows"], key=lambda row: row[0])
    if points["columns"][0] == "round":
        rows = [[round_number(row[0]), *row[1:]] for row in rows]
    at = points["columns"].index
    lines: list[Line] = []
    bands: list[Band] = []
    if panel.each is not None:
        column, member = panel.each
        lines = list(_each_lines(rows, at(column), member))
    elif panel.by is not None:
        groups = grouped((str(row[at(panel.by)]), row) for row in rows)
        # The op comes first, because it is chosen first.
        names = sorted(groups, key=lambda name: (name != "op", name))
        for color, name in zip(COLORS, names, strict=False):
            curve = _curve(groups[name], at(panel.lines[0].column))
            lines.append(Line(name=_words(name), points=curve, kind=color))
    else:
        for color, line in zip(COLORS, panel.lines, strict=False):
            curve = _curve(rows, at(line.column))
            if not any(curve):
                continue
            joined = known_points(curve) if line.is_joined else curve
            kind = f"{color} dashed" if line.is_dashed else color
            lines.append(Line(name=line.name, points=joined, kind=kind))
            if line.low is not None and line.high is not None:
                low, high = _curve(rows, at(line.low)), _curve(rows, at(line.high))
                bands.append(Band(name="", low=low, high=high, kind=f"{color} band"))
    axis = _AXIS_NAMES.get(points["columns"][0], points["columns"][0])
    return copy_fields(Chart, panel, lines=lines, bands=bands, axis=axis)


def _curve(rows: Sequence[Sequence[Any]], place: int) -> list[Point | None]:
    return [make_point(row[0], row[place]) for row in rows]


def _each_lines(rows: Sequence[Sequence[Any]], place: int, member: str) -> Iterator[Line]:
    """Yield a line for each name in a JSON column, the largest first."""
    found: dict[str, list[Point | None]] = {}
    for row in rows:
        if isinstance(row[place], Mapping):
            for name, value in row[place].items():
                inner = value.get(member) if member and isinstance(value, Mapping) else value
                amount = inner if isinstance(inner, int | float) else None
                found.setdefault(str(name), []).append(make_point(row[0], amount))
    sizes = {name: sum(abs(value) for _, value in known_points(found[name])) for name in found}
    ranked = sorted((name for name in found if sizes[name]), key=lambda name: -sizes[name])
    for color, name in zip(COLORS, ranked, strict=False):
        yield Line(name=_words(name), points=found[name], kind=color)


def _words(name: str) -> str:
    return visible(name, limit=40).replace("_", " ").lower()
