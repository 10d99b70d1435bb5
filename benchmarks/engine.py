"""Measure the population engine: row-epochs and images per second, phases, memory.

What is measured and how is in `esper.lab.bench.engine`; `esper bench engine` shows the same. With
`--processes K`, the workers strategy and as many independent processes that have the same rows one
after another take turns on the CPU; their summed rate is what the workers are compared with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

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


def serve(connection: Connection, job: dict[str, Any]) -> None:
    """Build a population in a process of its own and time a step whenever asked to."""
    import torch

    torch.set_num_threads(1)
    population, step = build(job)
    while connection.recv():
        started = time.perf_counter()
        step()
        connection.send(time.perf_counter() - started)
    population.close()


def build(job: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """Return a population on the CPU and the function that lives through one step of it."""
    from esper.lab.bench.engine import (
        Case,
        grown_population,
        measured_task,
        random_data,
    )
    from esper.leyline.actions import placeholder_actions

    case = Case(**job)
    task = measured_task(case.task, case.batch_size, case.samples)
    population = grown_population(task, random_data(task), case, "cpu")
    waiting = placeholder_actions(case.rows)
    return population, lambda: population.step(waiting)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", nargs="+", default=["cifar_baseline"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--strategies", nargs="*", default=["sequential", "stacked"])
    parser.add_argument("--sequential-rows", type=int, default=4, help="rows timed one by one")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=0, help="independent processes at once")
    parser.add_argument("--rounds", type=int, default=9, help="turns of workers and processes")
    parser.add_argument("--bare", action="store_true", help="hosts without seeds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)

    import torch

    from esper.lab.bench.engine import make_cases, measure, ratios

    torch.set_num_threads(1)
    shared = {
        "batch_size": options.batch_size,
        "samples": options.samples,
        "has_seeds": not options.bare,
        "warm_up": 1,
    }
    one_by_one = {"rows": options.sequential_rows, "steps": 1}
    cases = make_cases(
        options.tasks,
        options.strategies,
        options.rows,
        options.precisions,
        reference=one_by_one if "sequential" in options.strategies else None,
        steps=options.steps,
        **shared,
    )
    results = []
    for case in cases:
        results.append(measure(case, options.device))
        found = {**results[-1].to_mapping(), "ratio": ratios(results)[-1]}
        print(" ".join(describe(found)), file=sys.stderr, flush=True)
    found = [
        {**result.to_mapping(), "ratio": ratio}
        for result, ratio in zip(results, ratios(results), strict=True)
    ]
    apart = [
        measure_apart(
            {"task": task, "rows": options.rows[0], **shared}, options.processes, options.rounds
        )
        for task in options.tasks
        if options.processes
    ]
    if options.json:
        print(json.dumps({"results": found, "independent_processes": apart}, indent=2))
        return 0
    if found:
        print_table(HEADER, [describe(result) for result in found])
    for each in apart:
        print(
            f"\n{each['task']}, {each['rows']} rows: workers reach {each['ratio']:.3f} of the "
            f"summed rate of {each['processes']} independent processes, {each['apart']:.2f} "
            f"row-epochs/s (medians of {options.rounds} interleaved rounds, ratios from "
            f"{each['ratios'][0]:.2f} to {each['ratios'][-1]:.2f})"
        )
    return 0


def measure_apart(job: dict[str, Any], count: int, rounds: int) -> dict[str, Any]:
    """Time the workers strategy and independent processes with the same rows in turns."""
    context, rows = multiprocessing.get_context("spawn"), job["rows"]
    bounds = [rows * number // count for number in range(count + 1)]
    ends, processes = [], []
    for first, last in pairwise(bounds):
        ours, theirs = context.Pipe()
        part = {**job, "strategy": "sequential", "first_row": first, "rows": last - first}
        processes.append(context.Process(target=serve, args=(theirs, part), daemon=True))
        processes[-1].start()
        ends.append((ours, last - first))
    population, step = build({**job, "strategy": "workers"})
    ratios, rates = [], []
    # The first turns warm up; the workers may also exchange rows in them.
    for turn in range(rounds + 2):
        started = time.perf_counter()
        step()
        together = rows / (time.perf_counter() - started)
        for end, _ in ends:
            end.send(True)
        apart = sum(share / end.recv() for end, share in ends)
        if turn >= 2:
            ratios.append(together / apart)
            rates.append(apart)
    population.close()
    for (end, _), process in zip(ends, processes, strict=True):
        end.send(False)
        process.join()
    return {
        "task": job["task"],
        "rows": rows,
        "processes": count,
        "apart": median(rates),
        "ratio": median(ratios),
        "ratios": sorted(ratios),
    }


def describe(result: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    memory, ratio = result["memory_gib"], result["ratio"]
    phases = sum(result[name] for name in ("train_s", "validate_s", "other_s"))
    return [
        result["task"],
        result["strategy"],
        str(result["rows"]),
        result["precision"],
        f"{result['row_ms']:.2f}",
        f"{result['row_epochs_per_s']:.1f}",
        f"{result['images_per_s']:,.0f}",
        f"{100 * result['train_s'] / phases:.0f} %",
        f"{100 * result['validate_s'] / phases:.0f} %",
        "–" if memory is None else f"{memory:.1f}",
        str(result["captures"]),
        f"{100 * result['matmul_share']:.1f} %",
        "–" if ratio is None else f"{ratio:.1f}×",
    ]
