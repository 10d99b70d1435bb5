"""The heuristic against its WAIT-only twin on digits: test accuracy, paired over seeds.

For every seed one run of `esper grow --task digits --controller heuristic`; the twin has the same
initial weights and sees the same batches.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.pool import run_all
from benchmarks.table import print_table


def grow_one(seed: int, task_name: str, epochs: int | None) -> dict[str, Any]:
    from esper.growth.build import task_config, task_run
    from esper.tasks import get_task

    task = get_task(task_name)
    changes = {} if epochs is None else {"epochs": epochs}
    run = task_run(
        task, task.load(), config=task_config(task, seed=seed, **changes), controller="heuristic"
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
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("an interval needs at least 2 seeds")
    work = partial(grow_one, task_name=options.task, epochs=options.epochs)
    results = run_all(work, range(options.seeds), options.jobs)
    gain = paired_interval([r["test_score"] - r["twin_test_score"] for r in results])
    if options.json:
        print(json.dumps({"gain": asdict(gain), "runs": results}, indent=2))
        return 0
    rows = []
    for r in results:
        seeds = "; ".join(
            f"{s['blueprint']} @{s['germinated']} {s['slot']} {s['fate']}" for s in r["seeds"]
        )
        rows.append(
            [
                r["seed"],
                r["latch"],
                f"{r['twin_test_score']:.2f}",
                f"{r['test_score']:.2f}",
                f"{r['test_score'] - r['twin_test_score']:+.2f}",
                f"{r['parameters_before']:,} → {r['parameters_after']:,}",
                seeds or "–",
            ]
        )
    header = ["seed", "settled at", "twin", "grown", "gain", "parameters", "seeds (@ germinated)"]
    print_table(header, rows)
    print(f"\nmean gain in points, 95 % paired t interval: {gain}")
    return 0
