"""Tune the learning rate of hosts that never grow, for every member of the arena.

Each learning rate is one population of rows that wait. The best rate is chosen by the validation
score; the test score is that of the best rate. Hosts of 1.5 and 2 times the width are tuned too,
because grown networks are compared with them. Every run is a line of JSON in `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections import defaultdict
from statistics import fmean
from typing import Any

from benchmarks._arena import (
    STATIC_FACTORS,
    MemberJob,
    add_member_options,
    add_recipe_options,
    add_run_options,
    is_cuda,
    load,
    members_of,
    read_lines,
    record_all,
    wider,
)
from benchmarks.table import print_table, require_results
from esper.kasmina.training import OptimizerName

RATES: dict[OptimizerName, tuple[float, ...]] = {
    "sgd": (0.1, 0.2, 0.05, 0.025, 0.4, 0.0125, 0.8),
    "adamw": (0.003, 0.006, 0.0015, 0.012, 0.0008, 0.025),
}
"""The learning rates tried, the likely ones first: a run may be cut short."""

LAST = 3
"""Epochs over which validation scores are averaged: one alone is noisy."""


def run(job: MemberJob) -> dict[str, Any]:
    """Train the rows of a job and return its record."""
    from esper.lab.population.engine import PopulationConfig
    from esper.lab.population.population import Population
    from esper.leyline.actions import placeholder_actions

    started = time.perf_counter()
    task = job.recipe.task(job.member, job.learning_rate)
    horizon = task.config.horizon
    population = Population(
        task,
        len(job.seeds),
        device=job.device,
        strategy=job.strategy,  # type: ignore[arg-type]
        data=[load(task, job.folder, job.test_limit)],
        config=PopulationConfig(use_bf16=job.bf16),
        row_seeds=job.seeds,
    )
    try:
        waiting = placeholder_actions(population.rows)
        scores = [population.reset().val_score.tolist()]
        while len(scores) < horizon:
            if time.time() > job.deadline:
                raise TimeoutError(f"out of time after {len(scores)} of {horizon} epochs")
            scores.append(population.step(waiting).val_score.tolist())
        trained = time.perf_counter()
        test = population.test_scores().tolist()
    finally:
        population.close()
    last = [fmean(each) for each in zip(*scores[-LAST:], strict=True)]
    middle = scores[len(scores) // 2 - 1]
    return {
        **job.facts(),
        "horizon": horizon,
        "parameters": task.host_parameters,
        "flops": task.host_flops,
        "val": last,
        "val_midway": middle,
        "test": test,
        "train_s": round(trained - started, 2),
        "test_s": round(time.perf_counter() - trained, 2),
    }


def best_by_member(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for every member the record of its best learning rate, with what led to the choice."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if "error" not in record:
            groups[record["member"]].append(record)
    found = {}
    for label, group in groups.items():
        means = {each["learning_rate"]: _mean(each["val"]) for each in group}
        best = max(group, key=lambda each: _mean(each["val"]))
        rates = sorted(means)
        found[label] = {
            **best,
            "tried": {rate: means[rate] for rate in rates},
            "at_edge": len(rates) > 1 and best["learning_rate"] in (rates[0], rates[-1]),
        }
    return found


def _mean(values: list[float]) -> float:
    """Return the mean, least of all where a row is not finite."""
    return fmean(values) if all(map(math.isfinite, values)) else -math.inf


def rates_by_size(records: list[dict[str, Any]]) -> list[tuple[str, str, int, dict[float, float]]]:
    """Return mean validation by rate for every data set, host and number of images.

    That is the resolution of `esper.lab.tasks.member`; means are over members tried at every rate.
    """
    groups: dict[tuple[str, str, int], dict[str, dict[float, float]]] = defaultdict(dict)
    for record in records:
        if "error" not in record:
            key = (record["data"], record["host"], record["train_size"])
            found = groups[key].setdefault(record["member"], {})
            found[record["learning_rate"]] = _mean(record["val"])
    table = []
    for key, by_member in sorted(groups.items()):
        shared = set.intersection(*(set(found) for found in by_member.values()))
        means = {
            rate: fmean(found[rate] for found in by_member.values()) for rate in sorted(shared)
        }
        table.append((*key, means))
    return table


def print_summary(records: list[dict[str, Any]]) -> None:
    """Print what was found."""
    import torch

    rows = []
    for label, best in best_by_member(records).items():
        test = torch.tensor(best["test"], dtype=torch.float64)
        deviation = float(test.std()) if len(test) > 1 else math.nan
        tried = ", ".join(f"{rate:g}: {value:.1f}" for rate, value in best["tried"].items())
        rows.append(
            [
                label,
                f"{best['learning_rate']:g}{'*' if best['at_edge'] else ''}",
                f"{float(test.mean()):.2f} ({deviation:.2f})",
                f"{best['parameters']:,}",
                f"{best['flops'] / 1e6:.2f}",
                tried,
            ]
        )
    print_table(
        ["host", "best rate", "test (deviation)", "parameters", "MFLOP", "validation by rate"], rows
    )
    print("\nBy data, host and images, for esper.lab.tasks.member:\n")
    lines = []
    for data, host, size, means in rates_by_size(records):
        best = max(means, key=lambda rate: means[rate]) if means else math.nan
        edge = "*" if means and best in (min(means), max(means)) else ""
        tried = ", ".join(f"{rate:g}: {value:.1f}" for rate, value in means.items())
        lines.append([data, host, f"{size}", f"{best:g}{edge}", tried])
    print_table(["data", "host", "images", "best rate", "mean validation by rate"], lines)
    for record in records:
        if "error" in record:
            print(f"failed: {record['item']}: {record['error']}\n{record['traceback']}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune_hosts", description=__doc__)
    add_run_options(parser, out="tune_hosts.jsonl", seconds=240.0, seeds=6, first_seed=0)
    add_member_options(parser)
    parser.add_argument("--no-wider", action="store_true", help="leave the wider hosts out")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates (default: some for the optimizer)"
    )
    add_recipe_options(parser, for_seeds=False)
    options = parser.parse_args(arguments)
    if options.summary is not None:
        require_results(options.summary)
        print_summary(read_lines(options.summary))
        return 0
    deadline = time.time() + options.seconds
    members = members_of(options.family, options.split, options.members)
    if options.horizon:
        members = [dataclasses.replace(member, horizon=options.horizon) for member in members]
    if not options.no_wider:
        members += [wider(member, factor) for factor in STATIC_FACTORS for member in members]
    members = list(dict.fromkeys(members))
    settings = MemberJob.settings_of(options)
    jobs = [
        MemberJob(member=member, learning_rate=rate, deadline=deadline, **settings)
        # Rates outside: hosts of different shape come first, each in a process that compiles it.
        for rate in options.rates or RATES[options.optimizer]
        for member in members
    ]
    # Several processes share a CUDA device.
    processes = options.jobs or (6 if is_cuda(options.device) else 1)
    print(f"{len(jobs)} populations of {options.seeds} rows, {processes} at once", flush=True)
    records = record_all(run, jobs, processes, options, _line)
    print_summary(records)
    return 0


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['member']} at {record['learning_rate']:g}: "
        f"val {_mean(record['val']):.1f} test {_mean(record['test']):.1f} "
        f"({record['train_s']:.1f} + {record['test_s']:.1f} s)"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
