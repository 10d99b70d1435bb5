"""The learning rate at which a host that only waits does best, for every task of the arena.

Each learning rate is one population of waiting rows; the best is chosen by the validation score,
and the test score says how good the host is then. Hosts of 1.5 and 2 times the width are tuned
alike: they are what a grown network is compared with. Every run is a line of JSON in `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._arena import (
    STATIC_FACTORS,
    Recipe,
    add_member_options,
    add_recipe_options,
    is_cuda,
    load,
    members_of,
    pick_jobs,
    read_lines,
    wider,
    work_through,
)
from benchmarks.table import print_table
from esper.kasmina.training import OptimizerName
from esper.lab.tasks.member import Member

RATES: dict[OptimizerName, tuple[float, ...]] = {
    "sgd": (0.1, 0.2, 0.05, 0.025, 0.4, 0.0125, 0.8),
    "adamw": (0.003, 0.006, 0.0015, 0.012, 0.0008, 0.025),
}
"""The learning rates tried, the likely ones first: a run may be cut short."""

LAST = 3
"""Epochs over which validation scores are averaged: one alone is noisy."""


@dataclass(frozen=True)
class Job:
    """One population of waiting rows."""

    member: Member
    learning_rate: float
    recipe: Recipe
    seeds: tuple[int, ...]
    folder: Path | None
    device: str
    strategy: str
    bf16: bool
    test_limit: int | None
    deadline: float


def run(job: Job) -> dict[str, Any]:
    """Train the rows to the end and return their scores."""
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
        "member": job.member.label,
        "data": job.member.data,
        "host": job.member.host,
        "train_size": job.member.train_size,
        "width": job.member.width,
        "learning_rate": job.learning_rate,
        **dataclasses.asdict(job.recipe),
        "horizon": horizon,
        "seeds": list(job.seeds),
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
    parser.add_argument(
        "--data", type=Path, help="folder of the data; the usual places if not given"
    )
    parser.add_argument("--out", type=Path, default=Path("tune_hosts.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the table of this file and end")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop by then")
    add_member_options(parser)
    parser.add_argument("--no-wider", action="store_true", help="leave the wider hosts out")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates (default: some for the optimizer)"
    )
    parser.add_argument("--seeds", type=int, default=6, help="rows of every population")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--horizon", type=int, help="epochs; the members' own by default")
    add_recipe_options(parser, for_seeds=False)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--strategy", default=None, help="stacked on a CUDA device by default")
    parser.add_argument("--fp32", action="store_true", help="no BF16 on a CUDA device")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 chooses")
    parser.add_argument("--test-limit", type=int, help="only so many test images, for trials")
    options = parser.parse_args(arguments)
    if options.summary is not None:
        print_summary(read_lines(options.summary))
        return 0
    started = time.time()
    on_cuda = is_cuda(options.device)
    members = members_of(options.family, options.split, options.members)
    if options.horizon:
        members = [dataclasses.replace(member, horizon=options.horizon) for member in members]
    if not options.no_wider:
        members += [wider(member, factor) for factor in STATIC_FACTORS for member in members]
    members = list(dict.fromkeys(members))
    jobs = [
        Job(
            member=member,
            learning_rate=rate,
            recipe=Recipe.of(options),
            seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)),
            folder=options.data,
            device=options.device,
            strategy=options.strategy or ("stacked" if on_cuda else "sequential"),
            bf16=on_cuda and not options.fp32,
            test_limit=options.test_limit,
            deadline=started + options.seconds,
        )
        # Rates outside: hosts of different shape come first, each in a process that compiles it.
        for rate in options.rates or RATES[options.optimizer]
        for member in members
    ]
    processes = pick_jobs(options.jobs, options.device)
    print(f"{len(jobs)} populations of {options.seeds} rows, {processes} at once", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with options.out.open("a", encoding="utf-8") as file:
        for record in work_through(run, jobs, processes, started + options.seconds):
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(_line(record, len(records), len(jobs), time.time() - started), flush=True)
    print(f"{len(records)} of {len(jobs)} done after {time.time() - started:.0f} s\n")
    print_summary(records)
    return 0


def _line(record: dict[str, Any], number: int, count: int, seconds: float) -> str:
    if "error" in record:
        return f"[{seconds:4.0f} s] {number}/{count} failed: {record['error']}"
    return (
        f"[{seconds:4.0f} s] {number}/{count} {record['member']} at {record['learning_rate']:g}: "
        f"val {_mean(record['val']):.1f} test {_mean(record['test']):.1f} "
        f"({record['train_s']:.1f} + {record['test_s']:.1f} s)"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
