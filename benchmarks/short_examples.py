"""Run the programs of docs/short-examples.md on five seeds and compare them with their twins.

Only the seed is changed. `--sets` repeats the runs under every instruction set of the processor;
the page states the range over all of them. `--rates` tries learning rates on the seeds 0 to 4 and
prints the twin's validation score at each, because the rate is chosen for the twin. `--rate` and
`--controller` replace the rate or the controller of the program.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pool import add_sets_option, run_all, run_under
from benchmarks.table import format_range, print_table

PAGE = Path(__file__).parents[1] / "docs" / "short-examples.md"
FIRST_SEED = 10
SEEDS = tuple(range(FIRST_SEED, FIRST_SEED + 5))
"""Seeds of the figures on the page; learning rates were chosen on the seeds 0 to 4."""
SNIPPETS = {"digits": "An image classifier", "text": "A language model"}
"""Heading of each program on the page."""


def snippet(name: str) -> str:
    """Return the program below a heading of the page."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"##+ {SNIPPETS[name]}\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert found is not None, f"{PAGE.name} has no program below the heading {SNIPPETS[name]!r}"
    return found[1]


def run_snippet(
    name: str,
    seed: int,
    *,
    rate: float | None = None,
    epochs: int | None = None,
    controller: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Run a program with these changes; return its variables and its output.

    Warnings about a poor result are ignored, because the caller compares the results.
    """
    code = _replace(snippet(name), r"(manual_seed\()\d+", seed)
    if rate is not None:
        code = _replace(code, r"(lr=)[\d.]+", rate)
    if epochs is not None:
        code = _replace(code, r"(epochs\"?[=:] ?)\d+", epochs)
    if controller is not None:
        code = _replace(code, r"(controller\"?[=:] ?)\"\w+\"", repr(controller))
    names: dict[str, Any] = {}
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.filterwarnings(
            "ignore", message="Nothing grew|A static network|.*still being blended in"
        )
        exec(code, names)
    return names, said.getvalue()


def measure(
    job: tuple[int, float | None], name: str, controller: str | None = None
) -> dict[str, Any]:
    seed, rate = job
    summary = run_snippet(name, seed, rate=rate, controller=controller)[0]["grown"].summary
    return {
        "seed": seed,
        "rate": rate,
        "twin": summary.twin_test_score,
        "grown": summary.test_score,
        "twin_val": summary.twin_val_score,
        "parameters": [summary.parameters_before, summary.parameters_after],
        "flops": [summary.flops_before, summary.flops_after],
        "seeds": [f"{seed.blueprint} {seed.fate}" for seed in summary.seeds],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks short_examples", description=__doc__
    )
    parser.add_argument("what", nargs="?", choices=tuple(SNIPPETS), default="digits")
    parser.add_argument("--rates", nargs="+", type=float, default=(), metavar="LR")
    parser.add_argument("--rate", type=float, metavar="LR")
    parser.add_argument("--controller", metavar="C")
    add_sets_option(parser)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    work = partial(measure, name=options.what, controller=options.controller)
    if options.rates:
        jobs = [(seed, rate) for rate in options.rates for seed in range(len(SEEDS))]
        results = run_all(work, jobs, options.jobs)
    else:
        found = run_under(options.sets, work, [(s, options.rate) for s in SEEDS], options.jobs)
        results = [{"set": name, **each} for name, own in found.items() for each in own]
    if options.json:
        print(json.dumps(results, indent=2))
    elif options.rates:
        rows = [_rate_row(rate, results) for rate in options.rates]
        print_table(["rate", "twin, validation", "median gain, test"], rows)
    else:
        print_table(
            ["set", "seed", "twin", "grown", "gain", "parameters", "FLOPs", "seeds"],
            [_row(result) for result in results],
        )
        print(f"\n{format_range([result['grown'] - result['twin'] for result in results])}")
    return 0


def _rate_row(rate: float, results: Sequence[dict[str, Any]]) -> list[str]:
    own = [result for result in results if result["rate"] == rate]
    gain = median(result["grown"] - result["twin"] for result in own)
    return [f"{rate:g}", f"{median(result['twin_val'] for result in own):.2f}", f"{gain:+.2f}"]


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["set"],
        str(result["seed"]),
        f"{result['twin']:.2f}",
        f"{result['grown']:.2f}",
        f"{result['grown'] - result['twin']:+.2f}",
        " → ".join(f"{size:,}" for size in result["parameters"]),
        " → ".join(f"{size:,}" for size in result["flops"]),
        ", ".join(result["seeds"]) or "none",
    ]


def _replace(code: str, pattern: str, value: float | str) -> str:
    text = value if isinstance(value, str) else f"{value:g}"
    changed, count = re.subn(pattern, rf"\g<1>{text}", code)
    assert count == 1, f"{pattern} matches {count} times in the program"
    return changed
