"""The key of the picture: what the colours and the marks mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from esper.report.lanes import SHAPES, draw_mark
from esper.report.markup import element, label, op_words
from esper.report.style import LEGEND_STAGES, MARGIN, ROW, WIDTH

_SYMBOL = 26.0
_COLUMNS = 3
_REFUSED = "hollow: refused"

Draw = Callable[[float, float], str]


def draw_legend(top: float) -> tuple[list[str], float]:
    """Draw the key from `top` on; return the drawing and where it ends."""
    stages = [(stage, _swatch(stage)) for stage in LEGEND_STAGES]
    marks = [(op_words(op), _mark(op)) for op in SHAPES]
    marks.append((_REFUSED, _mark("ADVANCE", done=False)))
    drawing, bottom = _set_in_columns(stages, top)
    more, bottom = _set_in_columns(marks, bottom + 4)
    return drawing + more, bottom


def _set_in_columns(entries: Sequence[tuple[str, Draw]], top: float) -> tuple[list[str], float]:
    """Set entries in columns; return the drawing and where it ends."""
    drawing: list[str] = []
    for index, (text, draw) in enumerate(entries):
        row, column = divmod(index, _COLUMNS)
        x = MARGIN + column * (WIDTH - 2 * MARGIN) / _COLUMNS
        y = top + (row + 0.5) * ROW
        drawing.append(draw(x + 9, y))
        drawing.append(label(text, x=x + _SYMBOL, y=y, dy=".35em"))
    return drawing, top + math.ceil(len(entries) / _COLUMNS) * ROW


def _swatch(stage: str) -> Draw:
    def draw(x: float, y: float) -> str:
        return element("rect", class_=stage, x=x - 8, y=y - 8, width=17, height=17)

    return draw


def _mark(op: str, *, done: bool = True) -> Draw:
    def draw(x: float, y: float) -> str:
        return draw_mark(op, x, y, done=done)

    return draw
