"""Throughput of the population engine: row-epochs and images per second, per phase, with memory.

What is measured and how is in `esper.population.throughput`; `esper bench engine` shows the same.
With `--processes K`, as many independent processes with rows one after another run at once, and
their summed rate is what the workers strategy is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from typing import Any

from benchmarks.pool import run_all
from benchmarks.table import print_table

HEADER = [
    "task",
    "strategy",
    "rows",
    "precision",
    "ms per row",
    "row-epochs/s",
    "images/s",
    "train",
    "validate",
    "GiB",
    "captures",
    "of matmul",
    "ratio",
]


def measure_alone(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one case in a process of its own."""
    import torch

    from esper.population.throughput import Case, measure

    torch.set_num_threads(1)
    return measure(Case(**job), "cpu").to_mapping()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", nargs="+", default=["cifar_baseline"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--strategies", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--sequential-rows", type=int, default=4, help="rows timed one by one")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=0, help="independent processes at once")
    parser.add_argument("--bare", action="store_true", help="hosts without seeds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)

    import torch

    from esper.population.throughput import Case, measure, ratios

    torch.set_num_threads(1)
    shared = {
        "batch_size": options.batch_size,
        "samples": options.samples,
        "has_seeds": not options.bare,
        "warm_up": 1,
    }
    cases = []
    for task in options.tasks:
        if "sequential" in options.strategies:
            rows = options.sequential_rows
            cases.append(Case(task=task, strategy="sequential", rows=rows, steps=1, **shared))
        cases += [
            Case(
                task=task,
                strategy=strategy,
                rows=rows,
                use_bf16=precision == "bf16",
                steps=options.steps,
                **shared,
            )
            for strategy in options.strategies
            if strategy != "sequential"
            for rows in options.rows
            for precision in options.precisions
        ]
    results = []
    for case in cases:
        results.append(measure(case, options.device))
        found = {**results[-1].to_mapping(), "ratio": ratios(results)[-1]}
        print(" ".join(describe(found)), file=sys.stderr, flush=True)
    found = [
        {**result.to_mapping(), "ratio": ratio}
        for result, ratio in zip(results, ratios(results), strict=True)
    ]
    apart = [measure_apart(options, task, shared) for task in options.tasks if options.processes]
    if options.json:
        print(json.dumps({"results": found, "independent_processes": apart}, indent=2))
        return 0
    print_table(HEADER, [describe(result) for result in found])
    for each in apart:
        workers = [r for r in found if r["strategy"] == "workers" and r["task"] == each["task"]]
        share = "".join(
            f"; workers reach {r['row_epochs_per_s'] / each['row_epochs_per_s']:.2f} of it"
            for r in workers
        )
        print(
            f"\n{each['task']}: {each['processes']} independent processes give "
            f"{each['row_epochs_per_s']:.2f} row-epochs/s together{share}"
        )
    return 0


def measure_apart(options: argparse.Namespace, task: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Share the same rows out among independent sequential processes and sum their rates."""
    total, count = options.rows[0], options.processes
    bounds = [total * number // count for number in range(count + 1)]
    jobs = [
        {
            "task": task,
            "strategy": "sequential",
            "first_row": first,
            "rows": last - first,
            "steps": options.steps,
            **shared,
        }
        for first, last in pairwise(bounds)
    ]
    results = run_all(measure_alone, jobs, count)
    return {
        "task": task,
        "processes": count,
        "rows": total,
        "row_epochs_per_s": sum(result["row_epochs_per_s"] for result in results),
    }


def describe(result: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    memory, ratio = result["memory_gib"], result["ratio"]
    return [
        result["task"],
        result["strategy"],
        str(result["rows"]),
        result["precision"],
        f"{result['row_ms']:.2f}",
        f"{result['row_epochs_per_s']:.1f}",
        f"{result['images_per_s']:,.0f}",
        f"{100 * result['train_s'] / result['step_s']:.0f} %",
        f"{100 * result['validate_s'] / result['step_s']:.0f} %",
        "–" if memory is None else f"{memory:.1f}",
        str(result["captures"]),
        f"{100 * result['matmul_share']:.1f} %",
        "–" if ratio is None else f"{ratio:.1f}×",
    ]
