"""Where things stand in the picture: epochs along its width, and texts beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from esper.leyline.records import EpochRecord
from esper.report.markup import Scale, element, label, round_ticks, tick_labels, width_in_em
from esper.report.style import FONT, MARGIN, WIDTH

AXIS_NAME = "epoch"
LANE_SCALE = "α 1"
"""The upper end of a lane, named in the room left of it."""

_TICK_ROOM = 78.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The horizontal extent of the panels, in epochs and in units."""

    x: Scale

    @property
    def left(self) -> float:
        """Where the first epoch begins."""
        return self.x.start

    @property
    def right(self) -> float:
        """Where the last epoch ends."""
        return self.x.end

    def ticks(self) -> list[float]:
        """Return the epochs that are named on the axis."""
        room = max(2, int((self.right - self.left) / _TICK_ROOM))
        return round_ticks(self.x.low, self.x.high, room, whole=True)

    def gridlines(self, top: float, bottom: float) -> Iterator[str]:
        """Draw a fine line at every tick."""
        for tick in self.ticks():
            x = self.x(tick)
            yield element("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom)

    def axis(self, top: float) -> Iterator[str]:
        """Draw the axis itself, with its numbers below it."""
        yield element("line", class_="axis", x1=self.left, x2=self.right, y1=top, y2=top)
        ticks = self.ticks()
        for tick, text in zip(ticks, tick_labels(ticks), strict=True):
            yield label(
                text,
                class_="muted number",
                x=self.x(tick),
                y=top + 5,
                dy="1em",
                text_anchor="middle",
            )
        yield label(
            AXIS_NAME, class_="muted", x=WIDTH - MARGIN, y=top + 5, dy="1em", text_anchor="end"
        )


def frame_for(history: Sequence[EpochRecord], left: float, right: float) -> Frame:
    """Return the frame in which an epoch reaches from the one before it to its own number."""
    # A decision stands at the end of the epoch it was made on, where its effect begins.
    return Frame(Scale(history[0].epoch - 1, history[-1].epoch, left, right))


_GAP = 10.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A text and where it would like to be."""

    text: str
    x: float
    anchor: str
    """Which end of the text is at `x`: start or end."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A text with the place it got."""

    text: str
    x: float
    anchor: str
    row: int
    wished: float
    """Where it would have liked to be, for a line that leads there."""


def text_width(text: str, *, is_strong: bool = False) -> float:
    """Return the room a text needs at the largest size."""
    return width_in_em(text) * FONT * (1.12 if is_strong else 1.0)


def place_labels(
    wishes: Sequence[Wish], *, left: float, right: float, rows: int, taken: float = 0.0
) -> tuple[list[Placed], int]:
    """Give every text a row in which it is free of the others.

    Args:
        wishes: The texts, in the order in which they choose.
        left: No text begins before.
        right: No text ends beyond; one that would is aligned to this edge.
        rows: How many rows there may be; a text that fits none of them is left out.
        taken: Row 0 is occupied from `left` to here.

    Returns:
        The placed texts, and how many were left out.
    """
    occupied: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
    if taken > left:
        occupied[0].append((left, taken))
    placed: list[Placed] = []
    for wish in wishes:
        width = text_width(wish.text)
        x, anchor = wish.x, wish.anchor
        if anchor == "start" and x + width > right:
            x, anchor = right, "end"
        elif anchor == "end" and x - width < left:
            x, anchor = left, "start"
        begin = x if anchor == "start" else x - width
        end = begin + width
        for row, spans in enumerate(occupied):
            if all(end + _GAP <= low or begin >= high + _GAP for low, high in spans):
                spans.append((begin, end))
                placed.append(Placed(wish.text, x, anchor, row, wish.x))
                break
    return placed, len(wishes) - len(placed)
