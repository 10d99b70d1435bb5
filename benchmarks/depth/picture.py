"""Draws the front of a cell: loss against training compute, static depths and grown networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.depth.cells import CELLS, Plan, by_default
from benchmarks.depth.summary import Arm, Record, arms_of, static_curve
from esper.nissa.report.chart import draw_path
from esper.nissa.report.markup import Scale, element, label, round_ticks, tick_labels
from esper.nissa.report.page import MARGIN, ROW, WIDTH, draw_svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, WIDTH - 20.0, 3.9 * ROW, 420.0
_HEIGHT = _BOTTOM + 2.6 * ROW


def draw_front(
    records: Sequence[Record], name: str, static_depths: Sequence[int] | None = None
) -> str:
    """Return the picture of one cell as SVG.

    Args:
        records: the runs of all cells.
        name: the cell to draw.
        static_depths: depths of the static networks to draw; all by default.
    """
    cell = CELLS[name]
    arms = arms_of(record for record in records if record["cell"] == name)
    depths = static_depths or sorted({arm.blocks for arm in arms if arm.is_static})
    curves = {blocks: static_curve(arms, blocks) for blocks in depths}
    copies = [arm for arm in arms if _is_grown_by_copies(arm, cell.rate)]
    is_default = {arm.key: _plan(arm) == by_default(arm.blocks) for arm in copies}
    points = [
        *(point for curve in curves.values() for point in curve),
        *((a.flops, a.score) for a in copies),
    ]
    across = _log_scale([flops for flops, _ in points], _LEFT, _RIGHT)
    down = _log_scale([score for _, score in points], _BOTTOM, _TOP)
    score = "test error" if "error" in records[0] else "validation loss"
    parts = [*_legend(score), *_axes(across, down)]
    for blocks, curve in curves.items():
        spots = [(math.log(flops), math.log(score)) for flops, score in curve]
        parts.append(draw_path("curve twin", spots, across, down))
        for flops, value in spots:
            parts.append(
                element("circle", class_="end twin", cx=across(flops), cy=down(value), r=3.5)
            )
        x, y = across(spots[0][0]), down(spots[0][1])
        parts.append(label(f"{blocks}", class_="twin", x=x - 9, y=y, dy=".35em", text_anchor="end"))
    for arm in sorted(copies, key=lambda arm: is_default[arm.key]):
        x, y = across(math.log(arm.flops)), down(math.log(arm.score))
        if is_default[arm.key]:
            parts.append(element("circle", class_="end grown", cx=x, cy=y, r=5))
            stages = "→".join(str(blocks) for _, blocks in arm.first["plan"])
            parts.append(label(stages, class_="strong grown", x=x + 10, y=y, dy=".35em"))
        else:
            parts.append(element("circle", class_="end grown", cx=x, cy=y, r=3, opacity=0.45))
    told = f"{score.capitalize()} of static and of grown networks against training FLOPs"
    return draw_svg(f"{score.capitalize()}, cell {name}", told, parts, _HEIGHT, is_file=True)


def _is_grown_by_copies(arm: Arm, rate: float) -> bool:
    """Return whether an arm is what `esper.Deepen` does, at the cell's own rate."""
    ours = {"start": "state", "order": "stack", "schedule": "wsd", "rewarm": 0, "ramp": 0.0}
    first = arm.first
    return (
        not arm.is_static
        and first["rate"] == rate
        and all(first[key] == value for key, value in ours.items())
    )


def _plan(arm: Arm) -> Plan:
    return tuple((share, blocks) for share, blocks in arm.first["plan"])


def _log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.06 * (high - low)
    return Scale(low - room, high + room, start, end)


def _legend(score: str) -> list[str]:
    """Return what is drawn, and in which colour."""
    return [
        label(score, class_="strong", x=MARGIN, y=ROW),
        label("grey: static networks, by number of blocks", class_="twin", x=MARGIN, y=2 * ROW),
        label(
            "blue: grown by esper.Deepen; pale: other schedules",
            class_="grown",
            x=MARGIN,
            y=3 * ROW,
        ),
    ]


def _axes(across: Scale, down: Scale) -> list[str]:
    """Return grid lines with their values."""
    parts = []
    for exponent in range(8, 24):
        for digit in (1, 2, 3, 4, 6, 8):
            flops = digit * 10.0**exponent
            if across.low <= math.log(flops) <= across.high:
                x = across(math.log(flops))
                parts.append(element("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=_BOTTOM))
                parts.append(
                    label(
                        f"{digit}e{exponent}",
                        class_="muted number",
                        x=x,
                        y=_BOTTOM + ROW,
                        text_anchor="middle",
                    )
                )
    ticks = round_ticks(math.exp(down.low), math.exp(down.high), 6)
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        y = down(math.log(tick))
        parts.append(element("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(
            label(text, class_="muted number", x=_LEFT - 8, y=y, dy=".35em", text_anchor="end")
        )
    end = {"x": _RIGHT, "y": _BOTTOM + 2 * ROW, "text_anchor": "end"}
    return [*parts, label("training FLOPs", class_="muted", **end)]
