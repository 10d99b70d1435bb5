"""The key of the picture: what the colours and the marks mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esper.report.labels import text_width
from esper.report.marks import SHAPES, draw_mark, op_words
from esper.report.style import LEGEND_STAGES, MARGIN, ROW, WIDTH
from esper.report.svg import element, label

_SYMBOL = 26.0
_GAP = 16.0
_REFUSED = "hollow: refused"

Draw = Callable[[float, float], str]


def draw_legend(top: float) -> tuple[list[str], float]:
    """Draw the key from `top` on; return the drawing and where it ends."""
    stages = [(stage, _swatch(stage)) for stage in LEGEND_STAGES]
    marks = [(op_words(op), _mark(op)) for op in SHAPES]
    marks.append((_REFUSED, _mark("ADVANCE", done=False)))
    drawing, bottom = _flow(stages, top)
    more, bottom = _flow(marks, bottom + 4)
    return drawing + more, bottom


def _flow(entries: Sequence[tuple[str, Draw]], top: float) -> tuple[list[str], float]:
    """Set entries one after the other, beginning a new row where one is full."""
    x = MARGIN
    drawing: list[str] = []
    for text, draw in entries:
        room = _SYMBOL + text_width(text)
        if x + room > WIDTH - MARGIN and x > MARGIN:
            x, top = MARGIN, top + ROW
        drawing.append(draw(x + 9, top + ROW / 2))
        drawing.append(label(text, x=x + _SYMBOL, y=top + ROW / 2, dy=".35em"))
        x += room + _GAP
    return drawing, top + ROW


def _swatch(stage: str) -> Draw:
    def draw(x: float, y: float) -> str:
        return element("rect", class_=stage, x=x - 8, y=y - 8, width=17, height=17)

    return draw


def _mark(op: str, *, done: bool = True) -> Draw:
    def draw(x: float, y: float) -> str:
        return draw_mark(op, x, y, done=done)

    return draw
