"""Curves as paths: points with gaps, thinned where there are more than anybody could see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from esper.report.svg import Scale, element, number

MOST_POINTS = 1200

# Beyond this a value is an accident; drawing it would flatten everything else.
_OFF_THE_CHART = 1e15

T = TypeVar("T")

Point = tuple[float, float]
"""Where on the axis, and the value there."""


def make_point(at: float, value: float | None) -> Point | None:
    """Return a point, or None where there is no value that could be drawn."""
    # The comparison is false for NaN as well.
    if value is None or not abs(value) < _OFF_THE_CHART:
        return None
    return float(at), float(value)


def known_points(points: Sequence[Point | None]) -> list[Point]:
    """Return the points that are there."""
    return [point for point in points if point is not None]


def draw_path(
    kind: str, points: Sequence[Point | None], x: Scale, y: Scale, *, most: int = MOST_POINTS
) -> str:
    """Draw a curve of a class; a missing point is a gap."""
    steps: list[str] = []
    for run in _runs(points):
        pairs = [f"{number(x(at))} {number(y(value))}" for at, value in thin(run, most)]
        # A lone point becomes a dot: a line of no length with round ends.
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
    """Draw what lies between two curves; where one of them has a gap, the area has one."""
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
    """Keep the lowest and the highest of every few points where there are too many to see."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        kept.extend(sorted({min(part, key=_value), max(part, key=_value)}))
    return kept


def _runs(points: Sequence[T | None]) -> Iterator[list[T]]:
    run: list[T] = []
    for point in (*points, None):
        if point is not None:
            run.append(point)
        elif run:
            yield run
            run = []


def _value(point: Point) -> float:
    return point[1]
