"""Arithmetic on recorded series; None is a value that was not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

Series = Sequence[float | None]


def measured(values: Series) -> list[float]:
    """Return the values that were measured and are finite, in order."""
    return [value for value in values if value is not None and math.isfinite(value)]


def smoothed(values: Sequence[float], decay: float) -> float | None:
    """Return the exponential moving average after the last value, None of nothing."""
    average: float | None = None
    for value in values:
        average = value if average is None else decay * average + (1 - decay) * value
    return average


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return sum(values) / len(values) if values else None


def is_latched(values: Series, *, enter: float, leave: float, consecutive: int) -> bool:
    """Return whether a series has fallen below `enter` and not recovered above `leave`.

    It takes `consecutive` values in a row to fall and one to recover. A value that was not
    measured is no news: it neither counts nor breaks a row.
    """
    latched, below = False, 0
    for value in measured(values):
        if latched:
            latched = value <= leave
            below = 0
        else:
            below = below + 1 if value < enter else 0
            latched = below >= consecutive
    return latched
