"""What `esper demo` measures, under several instruction sets: the figures that the README tells.

Its networks are grown and compared as the demo does it, without its picture and its report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.pool import add_sets_option, run_under
from benchmarks.table import print_table, told_range

SEEDS = 5


def measure(first_seed: int, seeds: int = SEEDS) -> dict[str, Any]:
    """Return twin, grown and static networks of the demo, and what grew."""
    from esper.cli.demo import CONTROLLER, TASK
    from esper.proof.same_size import compare, grow_once
    from esper.tasks import get_task

    task = get_task(TASK)
    data = task.load()
    chosen = range(first_seed, first_seed + seeds)
    grown = [grow_once(task, data, seed, CONTROLLER) for seed in chosen]
    twin, tended, static = (asdict(arm) for arm in compare(task, grown, data))
    return {"twin": twin, "grown": tended, "static": static}


def gains_of(result: dict[str, Any]) -> list[float]:
    """Return the gain over the twin of every pair."""
    pairs = zip(result["grown"]["test"], result["twin"]["test"], strict=True)
    return [grown - twin for grown, twin in pairs]


def main(arguments: list[str]) -> int:
    from esper.cli.demo import FIRST_SEED

    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    add_sets_option(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = run_under(options.sets, measure, [FIRST_SEED], 1)
    results = {name: own[0] for name, own in found.items()}
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    rows = [
        [
            name,
            arm["name"],
            f"{median(arm['test']):.2f}",
            f"{min(arm['test']):.2f} to {max(arm['test']):.2f}",
            f"{arm['parameters']:,}",
            f"{arm['flops']:,}",
        ]
        for name, result in results.items()
        for arm in result.values()
    ]
    print_table(["set", "", "median", "test accuracy", "parameters", "FLOPs"], rows)
    print(f"\n{told_range([gain for result in results.values() for gain in gains_of(result)])}")
    return 0
