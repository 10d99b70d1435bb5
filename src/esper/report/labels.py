"""Texts beside one another: each gets a row in which it is free of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper.report.markup import width_in_em
from esper.report.page import FONT

_LABEL_GAP = 10.0


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
            if all(end + _LABEL_GAP <= low or begin >= high + _LABEL_GAP for low, high in spans):
                spans.append((begin, end))
                placed.append(Placed(wish.text, x, anchor, row, wish.x))
                break
    return placed, len(wishes) - len(placed)
