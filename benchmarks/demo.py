"""What `esper demo` measures, under several instruction sets: the figures that the README tells.

Its networks are grown and compared as the demo does it, without its picture and its report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.pool import add_sets_option, run_under
from benchmarks.table import print_table, told_range

if TYPE_CHECKING:
    from esper.lab.tasks.dataset import TaskData
    from esper.lab.tasks.task import Task
    from esper.leyline.records import RunSummary

SEEDS = 5


def grow_all() -> tuple[Task, TaskData, list[RunSummary]]:
    """Grow the networks of the demo, each beside its twin."""
    from esper.lab.proof.arm import grow_once
    from esper.lab.tasks import get_task
    from esper.scripts.cli.demo import CONTROLLER, FIRST_SEED, TASK

    task = get_task(TASK)
    data = task.load()
    chosen = range(FIRST_SEED, FIRST_SEED + SEEDS)
    return task, data, [grow_once(task, data, seed, CONTROLLER) for seed in chosen]


def measure(_: int) -> dict[str, Any]:
    """Return twin, grown and static networks of the demo."""
    from esper.lab.proof.arm import compare

    task, data, grown = grow_all()
    twin, tended, static = (asdict(arm) for arm in compare(task, grown, data))
    return {"twin": twin, "grown": tended, "static": static}


def gains_of(result: dict[str, Any]) -> list[float]:
    """Return the gain over the twin of every pair."""
    pairs = zip(result["grown"]["test"], result["twin"]["test"], strict=True)
    return [grown - twin for grown, twin in pairs]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    add_sets_option(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = run_under(options.sets, measure, [0], 1)
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
