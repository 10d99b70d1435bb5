"""The picture of `esper demo`: validation loss against training compute."""

from __future__ import annotations

from itertools import pairwise

from esper.nissa.report.chart import Point as ChartPoint
from esper.nissa.report.chart import draw_path
from esper.nissa.report.markup import (
    Scale,
    element,
    label,
    round_ticks,
    text_width,
    tick_labels,
)
from esper.nissa.report.page import FONT, MARGIN, ROW, WIDTH, draw_svg
from esper.scripts.cli.demo import Outcomes

_TOP, _BOTTOM, _LEFT = 3.6 * ROW, 407.0, 62.0
_SETTLED = 0.1
"""Share of the training before which losses are not drawn: they fall too fast."""


def draw_front(outcomes: Outcomes) -> str:
    """Return the picture of all curves as SVG; circles mark steps at which blocks woke."""
    *_, grown = outcomes
    curves = {name: one.curve for name, one in outcomes.items() if one.curve}
    settled = [
        point
        for curve in curves.values()
        for point in curve
        if point.share >= _SETTLED or point is curve[-1]
    ]
    most = max(point.flops for point in settled)
    low, high = min(p.loss for p in settled), max(p.loss for p in settled)
    pad = 0.05 * (high - low) or 0.05
    names = {name: name.removeprefix("static, ").removeprefix("grown ") for name in curves}
    room = max(text_width(name, FONT, is_strong=True) for name in names.values())
    right = WIDTH - MARGIN - 10 - room
    x = Scale(0.0, most, _LEFT, right)
    y = Scale(low - pad, high + pad, _BOTTOM, _TOP)
    drawing = [
        label("Validation loss, nats per byte", class_="strong", x=MARGIN, y=ROW),
        label("static", class_="strong twin", x=MARGIN, y=2 * ROW),
        label("grown", class_="strong grown", x=MARGIN + 4 * FONT, y=2 * ROW),
        label("training FLOPs", class_="muted", x=right, y=_BOTTOM + 2 * ROW, text_anchor="end"),
    ]
    ticks = round_ticks(y.low, y.high, 6)
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        at = y(tick)
        drawing.append(element("line", class_="grid", x1=_LEFT, x2=right, y1=at, y2=at))
        drawing.append(label(text, class_="muted number", x=_LEFT - 8, y=at, text_anchor="end"))
    for tick in round_ticks(0.0, most, 5):
        text, at = f"{tick:.3g}", x(tick)
        drawing.append(
            label(text, class_="muted number", x=at, y=_BOTTOM + ROW, text_anchor="middle")
        )
    ends = []
    for name, curve in curves.items():
        kind = "grown" if name == grown else "twin"
        points: list[ChartPoint] = [(p.flops, p.loss) for p in curve if p in settled]
        drawing.append(draw_path(f"curve {kind}", points, x, y))
        for before, point in pairwise(curve):
            if point.blocks > before.blocks and point in settled:
                spot = {"cx": x(point.flops), "cy": y(point.loss)}
                drawing.append(element("circle", class_=f"end {kind}", r=4.5, **spot))
        ends.append((y(points[-1][1]), kind, names[name]))
    height = -ROW
    for at, kind, text in sorted(ends):
        height = max(at, height + 0.8 * ROW)
        drawing.append(label(text, class_=f"strong {kind}", x=right + 10, y=height, dy=".35em"))
    told = "; ".join(
        f"{name}: {curve[-1].loss:.3f} after {curve[-1].flops:.3g} training FLOPs"
        for name, curve in curves.items()
    )
    title = "Validation loss against training compute"
    return draw_svg(title, told, drawing, _BOTTOM + 2.6 * ROW, is_file=True)
