"""Building blocks of a vector drawing: escaped elements, linear scales and round ticks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.report.text import MINUS, escaped

Attribute = str | float | int


def element(name: str, /, *children: str, **attributes: Attribute) -> str:
    """Return one element; children are markup, attribute values are escaped.

    A trailing underscore in an attribute's name is dropped (`class_`), others become hyphens.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    if not children:
        return f"<{name}{pairs}/>"
    return f"<{name}{pairs}>{''.join(children)}</{name}>"


def label(content: object, **attributes: Attribute) -> str:
    """Return a line of text."""
    return element("text", escaped(content), **attributes)


def tooltip(content: object) -> str:
    """Return what a pointer resting on the enclosing element shows."""
    return element("title", escaped(content, limit=1000))


def number(value: float) -> str:
    """Return a coordinate in few characters; a hundredth of a unit is invisible."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight map from values `low..high` to coordinates `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most about `most` round values between `low` and `high`.

    Args:
        low: Where the axis starts.
        high: Where it ends, above `low`.
        most: How many values have room.
        whole: Only whole numbers, for axes that count.
    """
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * magnitude for factor in (1, 2, 2.5, 5, 10)]
    if whole:
        steps = [step for step in steps if step.is_integer()] or [1.0]
    step = next((step for step in steps if step >= raw * 0.999), steps[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the ticks as text, all with the same number of decimals."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 1e6 or step < 1e-5:
        texts = [f"{tick:.4g}" for tick in ticks]
    else:
        decimals = next((some for some in range(7) if math.isclose(round(step, some), step)), 7)
        # Adding 0.0 takes the sign off a negative zero.
        texts = [f"{round(tick, decimals) + 0.0:.{decimals}f}" for tick in ticks]
    return [text.replace("-", MINUS) for text in texts]


def _value(value: Attribute) -> str:
    return html.escape(value, quote=True) if isinstance(value, str) else number(value)
