"""Compare the heuristic with its twin, which never grows, on digits: test accuracy by seed.

Every seed is one run of `esper grow --task digits --controller heuristic --keep last`; the twin has
the same initial weights and batches. `--sets` repeats all runs under every instruction set of the
processor.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.pool import add_sets_option, run_under
from benchmarks.table import format_range, print_table


def grow_one(seed: int, task_name: str, epochs: int | None) -> dict[str, Any]:
    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import task_config, task_run

    task = get_task(task_name)
    changes = {} if epochs is None else {"epochs": epochs}
    run = task_run(
        task,
        task.load(),
        config=task_config(task, seed=seed, keep="last", **changes),
        controller="heuristic",
    )
    latch = None
    for record in run.epochs():
        if latch is None and record.stabilized:
            latch = record.epoch
    return {**run.finish().summary.to_mapping(), "latch": latch}


def main(arguments: list[str]) -> int:
    from esper.simic.training.evaluation import paired_interval

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks digits_heuristic", description=__doc__
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=10)
    add_sets_option(parser)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("an interval needs at least 2 seeds")
    work = partial(grow_one, task_name=options.task, epochs=options.epochs)
    found = run_under(options.sets, work, range(options.seeds), options.jobs)
    gains = {
        name: [r["test_score"] - r["twin_test_score"] for r in results]
        for name, results in found.items()
    }
    intervals = {name: paired_interval(own) for name, own in gains.items()}
    if options.json:
        told = {name: asdict(interval) for name, interval in intervals.items()}
        print(json.dumps({"gain": told, "runs": found}, indent=2))
        return 0
    header = ["set", "seed", "settled at", "twin", "grown", "gain", "parameters"]
    rows = [_row(name, r) for name, results in found.items() for r in results]
    print_table([*header, "seeds (@ germinated)"], rows)
    print()
    for name, interval in intervals.items():
        print(f"{name}: mean gain in points, 95 % paired t interval: {interval}")
    print(format_range([gain for own in gains.values() for gain in own]))
    return 0


def _row(name: str, result: dict[str, Any]) -> list[object]:
    seeds = (
        f"{seed['blueprint']} @{seed['germinated']} {seed['slot']} {seed['fate']}"
        for seed in result["seeds"]
    )
    return [
        name,
        result["seed"],
        result["latch"],
        f"{result['twin_test_score']:.2f}",
        f"{result['test_score']:.2f}",
        f"{result['test_score'] - result['twin_test_score']:+.2f}",
        f"{result['parameters_before']:,} → {result['parameters_after']:,}",
        "; ".join(seeds) or "–",
    ]
