"""Printing results as a Markdown table, and the paired interval behind every claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided 95 % t interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return the mean difference with its 95 % t interval."""
    from scipy.stats import t

    count = len(differences)
    mean = fmean(differences)
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

    print(line(list(header)))
    print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in cells:
        print(line(row))
