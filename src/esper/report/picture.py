"""The picture of a growing run: how the score moved, and what happened at every slot meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline.records import EpochRecord, SeedRecord, is_loss, seed_records
from esper.report import curve
from esper.report.bands import draw_lanes
from esper.report.curve import draw_caption, draw_curves, read_curves
from esper.report.frame import frame_for
from esper.report.lanes import MOST_LANES, Lane, read_lanes
from esper.report.legend import draw_legend
from esper.report.markup import (
    counted,
    element,
    escaped,
    format_contribution,
    format_number,
    label,
    shortened,
    tooltip,
    visible,
)
from esper.report.style import MARGIN, PICTURE_STYLE, ROW, WIDTH

DEFAULT_TITLE = "Score and slots over the epochs"
NAMESPACE = "http://www.w3.org/2000/svg"

_TITLE_LENGTH = 54
_MOST_LIVES_TOLD = 40


def growth_picture(history: Sequence[EpochRecord], *, title: str = DEFAULT_TITLE) -> str:
    """Draw a growing run as one self-contained SVG.

    The upper panel is the learning curve, with the twin's dashed beside it where one ran. Below,
    each slot has a lane: the colour is the stage, the height of the solid band is alpha, marks
    are decisions. The same history gives the same text, byte for byte.

    Args:
        history: The epochs of the run, in order; none at all gives a picture that says so.
        title: What stands above the picture and names it to screen readers.
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
    namespace = {"xmlns": NAMESPACE} if is_file else {}
    return element(
        "svg",
        tooltip(title),
        element("desc", escaped(describe(history), limit=10_000)),
        element("style", PICTURE_STYLE),
        element("rect", class_="surface", width=WIDTH, height=height),
        heading,
        *drawing,
        **namespace,
        class_="growth",
        role="img",
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
    )


def describe(history: Sequence[EpochRecord]) -> str:
    """Say in words what the picture shows, for those who do not see it."""
    if not history:
        return "No epochs were recorded."
    first, last = history[0], history[-1]
    unit = " (the negative loss)" if is_loss(last.val_score) else " points"
    told = [
        f"{counted(len(history), 'epoch')}. The validation score goes from "
        f"{format_number(first.val_score)} to {format_number(last.val_score)}{unit}"
        + ("." if last.twin_score is None else _tell_twin(last.twin_score))
    ]
    lives = seed_records(tuple(history))
    told.extend(_tell_life(life) for life in lives[:_MOST_LIVES_TOLD])
    if not lives:
        told.append("No seed was germinated.")
    elif len(lives) > _MOST_LIVES_TOLD:
        told.append(f"And {len(lives) - _MOST_LIVES_TOLD} more seeds.")
    return " ".join(told)


def _draw_run(history: Sequence[EpochRecord]) -> tuple[list[str], float]:
    curves = read_curves(history)
    frame = frame_for(history, MARGIN + curves.left_room(), WIDTH - MARGIN - curves.right_room())
    top = MARGIN + ROW + 12
    drawing = [draw_caption(curves, top)]
    top += ROW + 10
    drawing.extend(draw_curves(history, curves, frame, top))
    top += curve.HEIGHT + ROW + 26

    drawing.append(
        label(
            "Slots: colour is the stage, height is alpha",
            class_="strong",
            x=MARGIN,
            y=top,
            dy=".9em",
        )
    )
    legend, top = draw_legend(top + ROW + 4)
    drawing.extend(legend)
    chosen, undrawn = _most_eventful(read_lanes(history))
    lanes, top, left_out = draw_lanes(chosen, frame, top + 14)
    drawing.extend(lanes)
    drawing.extend(frame.axis(top))
    top += ROW + 8
    notes = [f"{counted(left_out, 'label')} found no room"] if left_out else []
    if undrawn:
        notes.append(f"{counted(undrawn, 'slot')} not drawn")
    for note in notes:
        drawing.append(label(note, class_="muted", x=MARGIN, y=top, dy="1em"))
        top += ROW + 4
    return drawing, top + MARGIN


def _most_eventful(lanes: list[Lane]) -> tuple[list[Lane], int]:
    """Return the lanes to draw in their order, those without a seed last, and how many are left."""
    if len(lanes) <= MOST_LANES:
        return lanes, 0
    ranked = sorted(lanes, key=lambda lane: not lane.lives)[:MOST_LANES]
    kept = {lane.name for lane in ranked}
    return [lane for lane in lanes if lane.name in kept], len(lanes) - MOST_LANES


def _draw_nothing() -> tuple[list[str], float]:
    text = label(
        "No epochs were recorded yet.", class_="muted", x=WIDTH / 2, y=100, text_anchor="middle"
    )
    return [text], 160.0


def _tell_twin(score: float) -> str:
    return f", that of the twin, which only waits, to {format_number(score)}."


def _tell_life(life: SeedRecord) -> str:
    told = f"Slot {visible(life.slot)}: {visible(life.blueprint)}, germinated after epoch"
    told += f" {life.germinated}, {visible(life.fate)}"
    if life.ended is not None:
        told += f" after epoch {life.ended}"
    gain = format_contribution(life.contribution, life.contribution_se)
    return f"{told}, contribution {gain}."
