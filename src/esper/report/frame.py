"""The frame both panels of the picture share: where epochs lie, and the axis that names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from esper.leyline.records import EpochRecord
from esper.report.markup import Scale, element, label, round_ticks, tick_labels
from esper.report.style import MARGIN, WIDTH

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
