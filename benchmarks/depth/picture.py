"""Draws the front of a cell: loss against training compute, static depths and grown networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.depth.cells import CELLS, Plan, by_default
from benchmarks.depth.summary import Arm, Record, arms_of, static_curve
from esper.nissa.report.markup import Scale, element, label

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 440, 64, 690, 76, 392
GROWN = "#0a62b4"
GREYS = ("#b9c1c9", "#98a2ac", "#77828d", "#56616d", "#38424c", "#19212a")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#19212a}.muted{fill:#56616d}"
    f".grown{{fill:{GROWN};font-weight:650}}"
)


def draw_front(records: Sequence[Record], name: str) -> str:
    """Return the picture of one cell as SVG."""
    cell = CELLS[name]
    arms = arms_of(record for record in records if record["cell"] == name)
    depths = sorted({arm.blocks for arm in arms if arm.is_static})
    curves = {blocks: static_curve(arms, blocks) for blocks in depths}
    copies = [arm for arm in arms if _is_grown_by_copies(arm, cell.rate)]
    is_default = {arm.key: _plan(arm) == by_default(arm.blocks) for arm in copies}
    points = [
        *(point for curve in curves.values() for point in curve),
        *((a.flops, a.score) for a in copies),
    ]
    across = _log_scale([flops for flops, _ in points], LEFT, RIGHT)
    down = _log_scale([score for _, score in points], BOTTOM, TOP)
    parts = [_axes(across, down, points, "error" if "error" in records[0] else "loss")]
    for blocks, curve in curves.items():
        color = GREYS[min(len(GREYS) - 1, depths.index(blocks))]
        spots = [(across(math.log(flops)), down(math.log(score))) for flops, score in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(element("polyline", points=path, fill="none", stroke=color, stroke_width=1.5))
        parts += [element("circle", cx=x, cy=y, r=3.5, fill="#fff", stroke=color) for x, y in spots]
        x, y = spots[0]
        parts.append(label(f"{blocks}", class_="muted", x=x - 8, y=y + 4, text_anchor="end"))
    for arm in sorted(copies, key=lambda arm: is_default[arm.key]):
        x, y = across(math.log(arm.flops)), down(math.log(arm.score))
        if is_default[arm.key]:
            parts.append(element("circle", cx=x, cy=y, r=5, fill=GROWN))
            stages = "→".join(str(blocks) for _, blocks in arm.first["plan"])
            parts.append(label(stages, class_="grown", x=x + 9, y=y + 4))
        else:
            parts.append(element("circle", cx=x, cy=y, r=3, fill=GROWN, opacity=0.4))
    head = [
        element("style", STYLE),
        element("rect", width="100%", height="100%", fill="#fff"),
        label(
            "static networks, by number of blocks; pale: grown by other schedules",
            class_="muted",
            x=LEFT,
            y=20,
        ),
        label("grown by copies, as esper.Deepen does by default", class_="grown", x=LEFT, y=38),
    ]
    size = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    return element("svg", *head, *parts, xmlns="http://www.w3.org/2000/svg", **size)


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


def _axes(across: Scale, down: Scale, points: Sequence[tuple[float, float]], score: str) -> str:
    """Return grid lines with their values."""
    parts = []
    for exponent in range(8, 24):
        for digit in (1, 2, 3, 4, 6, 8):
            flops = digit * 10.0**exponent
            if across.low <= math.log(flops) <= across.high:
                x = across(math.log(flops))
                parts.append(element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM, stroke="#eef1f4"))
                text = f"{digit}e{exponent}"
                parts.append(label(text, class_="muted", x=x, y=BOTTOM + 18, text_anchor="middle"))
    scores = [score for _, score in points]
    step_size = 10.0 ** math.floor(math.log10(max(scores) - min(scores))) / 2
    tick = math.ceil(min(scores) / step_size) * step_size
    while tick <= max(scores):
        y = down(math.log(tick))
        parts.append(element("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, stroke="#eef1f4"))
        parts.append(label(f"{tick:.3g}", class_="muted", x=LEFT - 8, y=y + 4, text_anchor="end"))
        tick += step_size
    parts.append(label("training FLOPs", class_="muted", x=RIGHT, y=BOTTOM + 38, text_anchor="end"))
    parts.append(
        label(
            f"validation {score}" if score == "loss" else "test error",
            class_="muted",
            x=8,
            y=TOP - 6,
        )
    )
    return element("g", *parts)
