"""Measure the epoch at which the host-stability latch closes, for every preset without growth."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.pool import run_all
from benchmarks.table import print_table


def wait_one(job: tuple[str, int], epochs: int | None, device: str) -> dict[str, Any]:
    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import task_config, task_run

    name, seed = job
    task = get_task(name)
    length = min(epochs or task.config.horizon, task.config.horizon)
    config = task_config(task, seed=seed, twin=False, epochs=length)
    run = task_run(task, task.load(device=device), config=config, controller="wait")
    latch = plateau = None
    for record in run.epochs():
        latch = record.epoch if latch is None and record.stabilized else latch
        plateau = record.epoch if plateau is None and record.plateau_epochs >= 3 else plateau
    return {
        "task": name,
        "seed": seed,
        "latch": latch,
        "plateau": plateau,
        "test": run.finish().summary.test_score,
        "epochs": length,
    }


def main(arguments: list[str]) -> int:
    from esper.lab.tasks import TASKS, describe_task

    parser = argparse.ArgumentParser(prog="python -m benchmarks stabilization", description=__doc__)
    parser.add_argument("--tasks", nargs="+", help="default: every task whose data is found")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="at most this many (default: the horizon)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    names = options.tasks or [
        name for name in TASKS.names() if describe_task(name)["data"]["status"] == "found"
    ]
    jobs = [(name, seed) for name in names for seed in range(options.seeds)]
    results = run_all(
        partial(wait_one, epochs=options.epochs, device=options.device), jobs, options.jobs
    )
    rows = []
    for name in names:
        mine = [r for r in results if r["task"] == name]
        rows.append(
            [
                name,
                mine[0]["epochs"],
                ", ".join(str(r["latch"] or "never") for r in mine),
                ", ".join(str(r["plateau"] or "never") for r in mine),
                ", ".join(f"{r['test']:.1f}" for r in mine),
            ]
        )
    print_table(["task", "epochs", "latch closes at", "first plateau of 3", "test score"], rows)
    return 0
