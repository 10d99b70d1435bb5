"""Find the results to print, print them as a Markdown table, format the range of gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median


def require_results(*paths: Path) -> None:
    """Raise an error if one of the files or folders with results does not exist."""
    from esper.leyline.errors import UsageError

    for path in paths:
        if not path.exists():
            raise UsageError(f"no results in {path}: it does not exist; give another path")


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


def format_range(gains: Sequence[float]) -> str:
    """Return one line with the range and the median of gains over twins."""
    ahead = sum(gain > 0 for gain in gains)
    return (
        f"gain over the twin: {min(gains):+.2f} to {max(gains):+.2f} points of test score, median "
        f"{median(gains):+.2f}; ahead of it in {ahead} of {len(gains)} runs"
    )
