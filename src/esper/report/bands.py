"""The lower panel: one lane per slot, with stages as colours and alpha as the height of a band."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from esper.leyline.records import SeedRecord
from esper.report.frame import LANE_SCALE, Frame
from esper.report.labels import Placed, Wish, place_labels, text_width
from esper.report.lanes import Lane, StageRun, draw_marks
from esper.report.markup import (
    NOT_MEASURED,
    element,
    escaped,
    format_contribution,
    format_number,
    label,
    shortened,
    tooltip,
    visible,
)
from esper.report.style import MARGIN, ROW, STAGE_CLASSES, WIDTH

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


def draw_lanes(lanes: Sequence[Lane], frame: Frame, top: float) -> tuple[list[str], float, int]:
    """Draw the lanes one below the other.

    Returns:
        The drawing, where it ends, and how many labels found no room.
    """
    drawing: list[str] = []
    left_out = 0
    for lane in lanes:
        draw = _draw_used if lane.runs or lane.decisions else _draw_unused
        parts, top, missing = draw(lane, frame, top)
        drawing.extend(parts)
        left_out += missing
    return drawing, top, left_out


def _draw_unused(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    band_top = top + ROW
    drawing = [*_background(frame, band_top, _UNUSED), _slot_name(lane, band_top)]
    if _name_end(lane) < frame.right - text_width(_NEVER) - 10:
        place = Placed(_NEVER, frame.right, "end", 0, frame.right)
        drawing.append(_draw_label(place, band_top - _LABEL_LIFT, "0", "muted"))
    return drawing, band_top + _UNUSED + _GAP, 0


def _draw_used(lane: Lane, frame: Frame, top: float) -> tuple[list[str], float, int]:
    names, no_name = _place(
        [
            Wish(shortened(life.blueprint, _BLUEPRINT_LENGTH), frame.x(life.germinated), "start")
            for life in lane.lives
        ],
        taken=_name_end(lane),
    )
    gains, no_gain = _place(
        [Wish(_gain(life), frame.x(_last_epoch(life, frame)), "end") for life in lane.lives]
    )
    band_top = top + ROW * max(1, _rows(names))
    bottom = band_top + _MARKS_END
    drawing = [
        *_background(frame, band_top, BAND),
        *_alpha_scale(frame, band_top),
        *(_draw_run(lane.name, run, frame, band_top) for run in lane.runs),
        *draw_marks(lane.decisions, frame, band_top + _MARKS),
        # Lines before texts, so that a text in the way of a line stays readable.
        *(_leader(placed, band_top, band_top - placed.row * ROW) for placed in names),
        *(_leader(placed, bottom, bottom + placed.row * ROW) for placed in gains),
        _slot_name(lane, band_top),
    ]
    for placed in names:
        drawing.append(_draw_label(placed, band_top - _LABEL_LIFT - placed.row * ROW, "0"))
    for placed in gains:
        y = bottom + placed.row * ROW
        drawing.append(_draw_label(placed, y, ".95em", "number muted"))
    return drawing, bottom + _rows(gains) * ROW + _GAP, no_name + no_gain


def _background(frame: Frame, top: float, height: float) -> Iterator[str]:
    width = frame.right - frame.left
    yield element("rect", class_="well", x=frame.left, y=top, width=width, height=height)
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


def _name_end(lane: Lane) -> float:
    return MARGIN + text_width(shortened(lane.name, _NAME_LENGTH), is_strong=True)


def _place(wishes: Sequence[Wish], taken: float = 0.0) -> tuple[list[Placed], int]:
    return place_labels(wishes, left=MARGIN, right=WIDTH - MARGIN, rows=_LABEL_ROWS, taken=taken)


def _rows(placed: Sequence[Placed]) -> int:
    return 1 + max((one.row for one in placed), default=-1)


def _draw_run(slot: str, run: StageRun, frame: Frame, top: float) -> str:
    kind = STAGE_CLASSES.get(run.stage, "cooldown")
    x, width = frame.x(run.begin), frame.x(run.end) - frame.x(run.begin)
    parts = [tooltip(_tell_run(slot, run))]
    if kind == "cooldown":
        parts.append(
            element(
                "rect",
                class_=kind,
                x=x + 1,
                y=top + _RIBBON_TOP + 1,
                width=max(width - 2, 0.5),
                height=_RIBBON - 2,
            )
        )
        return element("g", *parts, class_="run")
    parts.append(element("rect", class_=f"tint {kind}", x=x, y=top, width=width, height=BAND))
    for begin, end, alpha in run.steps:
        if alpha > 0:
            height = alpha * BAND
            parts.append(
                element(
                    "rect",
                    class_=f"alpha {kind}",
                    x=frame.x(begin),
                    y=top + BAND - height,
                    width=frame.x(end) - frame.x(begin),
                    height=height,
                )
            )
    parts.append(
        element(
            "rect", class_=f"ribbon {kind}", x=x, y=top + _RIBBON_TOP, width=width, height=_RIBBON
        )
    )
    return element("g", *parts, class_="run")


def _alpha_scale(frame: Frame, top: float) -> Iterator[str]:
    for text, y, dy in ((LANE_SCALE, top, ".8em"), ("0", top + BAND, "0")):
        yield label(text, class_="muted number", x=frame.left - 8, y=y, dy=dy, text_anchor="end")


def _draw_label(placed: Placed, y: float, dy: str, kind: str = "") -> str:
    return label(
        placed.text,
        class_=f"halo {kind}".strip(),
        x=placed.x,
        y=y,
        dy=dy,
        text_anchor=placed.anchor,
    )


def _tell_run(slot: str, run: StageRun) -> str:
    first, last = run.begin + 1, run.end
    epochs = f"epoch {last:g}" if first >= last else f"epochs {first:g} to {last:g}"
    told = [visible(run.stage).lower(), epochs]
    if run.blueprint is not None:
        told.insert(0, visible(run.blueprint))
    if run.steps:
        alphas = [format_number(run.steps[index][2], decimals=2) for index in (0, -1)]
        told.append(
            f"alpha {alphas[0]}" if len(set(alphas)) == 1 else f"alpha {' to '.join(alphas)}"
        )
    return f"{visible(slot)}: {', '.join(told)}"


def _leader(placed: Placed, start: float, end: float) -> str:
    """Draw the line from a life to a label that had to move away from it."""
    if placed.row == 0:
        return ""
    x = placed.wished
    return element("line", class_="leader", x1=x, x2=x, y1=start, y2=end)


def _gain(life: SeedRecord) -> str:
    text = format_contribution(life.contribution, life.contribution_se)
    return _NO_GAIN if text == NOT_MEASURED else text


def _last_epoch(life: SeedRecord, frame: Frame) -> float:
    # A fossilized seed has come to the end of its development, but it is there until the end.
    if life.fate == "pruned" and life.ended is not None:
        return float(life.ended)
    return frame.x.high
