"""Run the tutorial on five seeds; print what grows and the gain over the twin.

`--sets` runs it under every instruction set that the processor has; `--epochs` changes the
length of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import warnings
from functools import partial
from typing import Any

from benchmarks._pages import DOCS, python_blocks, run_blocks
from benchmarks.pool import add_sets_option, run_under
from benchmarks.table import format_range, print_table

PAGE = DOCS / "tutorial.md"
SEEDS = tuple(range(5))


def run_tutorial(
    seed: int = 0, *, until: str | None = None, epochs: int | None = None
) -> tuple[dict[str, Any], str]:
    """Run the page in an empty folder, with a random seed; return its names and its output.

    Args:
        seed: in place of the page's own.
        until: leave out all blocks after the first that has this text.
        epochs: of `esper.grow`, in place of the page's own.
    """
    blocks = python_blocks(PAGE)
    if until is not None:
        blocks = blocks[: 1 + next(i for i, block in enumerate(blocks) if until in block)]
    seeded, count = re.subn(r"(manual_seed\()\d+", rf"\g<1>{seed}", blocks[0])
    assert count == 1, "the first block of the tutorial sets the seed once"
    blocks[0] = seeded
    if epochs is not None:
        assert sum("epochs=50," in block for block in blocks) == 1
        blocks = [block.replace("epochs=50,", f"epochs={epochs},") for block in blocks]
    with warnings.catch_warnings():
        # What a run ends with, and so what it is warned of, differs from processor to processor.
        warnings.filterwarnings(
            "ignore",
            message="Nothing grew|A static network|.*still being blended in|.*too few to grow in",
        )
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return run_blocks(blocks)


def measure(seed: int, epochs: int | None = None) -> tuple[float, list[str]]:
    """Return the gain over the twin, and a row of the table."""
    grown = run_tutorial(seed, until="esper.grow(", epochs=epochs)[0]["grown"]
    summary = grown.summary
    gain = summary.test_score - summary.twin_test_score
    return gain, [
        str(seed),
        f"{summary.twin_test_score:.2f}",
        f"{summary.test_score:.2f}",
        f"{gain:+.2f}",
        f"{summary.parameters_before:,} → {summary.parameters_after:,}",
        ", ".join(f"{s.blueprint} at {s.slot} {s.fate}" for s in summary.seeds) or "none",
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tutorial", description=__doc__)
    add_sets_option(parser)
    parser.add_argument("--epochs", type=int, help="in place of the page's 50")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    work = partial(measure, epochs=options.epochs)
    found = run_under(options.sets, work, SEEDS, options.jobs)
    rows = [[name, *row] for name, results in found.items() for _, row in results]
    print_table(["set", "seed", "twin", "grown", "gain", "parameters", "seeds"], rows)
    print(f"\n{format_range([gain for results in found.values() for gain, _ in results])}")
    return 0
