"""Throughput of the population engine: row-epochs and images per second, per phase, with memory.

Rows are prepared with seeds in about half of their slots (blending, holding or training, every
blueprint and style), then live through whole steps: train, validate with all ablations, act. Data
are random bytes in the shape of the task's, because throughput does not depend on what they show.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.table import print_table
from esper.kasmina.hosts import CnnConfig
from esper.leyline.actions import decode_actions, placeholder_actions
from esper.leyline.alpha import AlphaAlgorithm
from esper.leyline.stages import SeedStage
from esper.population.config import PopulationConfig
from esper.population.population import Population
from esper.tasks import Task, get_task
from esper.tasks.data import Source
from esper.tasks.dataset import TaskData

WIDE = "cifar_wide"


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    task: str
    strategy: str
    rows: int
    use_bf16: bool


def make_task(name: str, batch_size: int | None) -> Task:
    """Return a preset, or the 3-block 32-64-128 host on CIFAR shapes."""
    changes = {} if batch_size is None else {"batch_size": batch_size}
    if name != WIDE:
        return get_task(name, **changes)
    return get_task("cifar_baseline", host_options=CnnConfig(channels=(32, 64, 128)), **changes)


class RandomData:
    """Stands in for the files of a task: random bytes of the right shape, said so openly."""

    def __init__(self, task: Task, samples: int = 20_000) -> None:
        self._task = task
        self._samples = samples

    def load(self, device: torch.device) -> TaskData:
        rng = np.random.default_rng(0)
        config = self._task.config
        x = rng.integers(0, 256, (self._samples, *config.input_shape), dtype=np.uint8)
        y = rng.integers(0, config.num_classes or 10, self._samples)
        source = Source("random bytes", "memory", x, y, num_classes=config.num_classes)
        task = type(self._task)(config)
        task.read = lambda data_path: source  # type: ignore[method-assign]
        return task.load(device=device)


def make_population(case: Case, device: str, batch_size: int | None) -> Population:
    """Return a population whose rows have seeds in about half of their slots."""
    task = make_task(case.task, batch_size)
    loaded = RandomData(task)
    task.load = lambda data_path=None, device="cpu": loaded.load(device)  # type: ignore[assignment,method-assign,misc]
    population = Population(
        task,
        case.rows,
        seed=1,
        device=device,
        strategy=case.strategy,  # type: ignore[arg-type]
        config=PopulationConfig(use_bf16=case.use_bf16),
    )
    population._cohorts = population._make_cohorts()
    for cohort in population.cohorts:
        populate(cohort)
    return population


def populate(cohort: Any) -> None:
    """Put seeds into about half of the slots, drawn by row; then start the engine."""
    generator = torch.Generator().manual_seed(0)
    state, fits = cohort.state, cohort.fits
    shape = state.stage.shape
    chosen = torch.rand(shape, generator=generator) < 0.5
    blueprint = torch.multinomial(fits.flatten(0, 1).double(), 1, generator=generator).reshape(
        shape
    )
    stages = torch.tensor(
        [SeedStage.BLENDING, SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.TRAINING]
    )
    stage = stages[torch.randint(0, len(stages), shape, generator=generator)]
    algorithm = torch.randint(0, len(AlphaAlgorithm), shape, generator=generator)
    alpha = torch.where(stage == int(SeedStage.TRAINING), 0.0, 0.5)
    state = state.where(
        chosen, stage=stage, blueprint=blueprint, algorithm=algorithm, alpha=alpha.double()
    )
    cohort.state = cohort._sized(state)
    cohort._safe = [cohort._snapshot_row(row) for row in range(cohort.rows)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, steps: int, batch_size: int | None) -> dict[str, Any]:
    """Run some steps and return rates and phase times."""
    population = make_population(case, device, batch_size)
    where = population.device
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    phases = {"train": 0.0, "validate": 0.0}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            synchronize(where)
            started = time.perf_counter()
            result = function(*args)
            synchronize(where)
            phases[name] += time.perf_counter() - started
            return result

        return call

    command = decode_actions(placeholder_actions(population.rows))
    for cohort in population.cohorts:
        cohort.engine.train = timed("train", cohort.engine.train)  # type: ignore[method-assign]
        cohort.engine.measure = timed("validate", cohort.engine.measure)  # type: ignore[method-assign]
    start = 0
    parts = []
    for cohort in population.cohorts:
        keep = slice(start, start + cohort.rows)
        part = {name: getattr(command, name)[keep] for name in command.__slots__}
        parts.append((cohort, type(command)(**part)))
        start += cohort.rows

    def step() -> None:
        for cohort, part in parts:
            cohort.step(part)

    warm = 2 if where.type == "cuda" else 0
    for _ in range(warm):
        step()
    phases.update(train=0.0, validate=0.0)
    synchronize(where)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(where)
    total = (time.perf_counter() - started) / steps
    samples = population.tasks[0].config.samples_per_step
    result = {
        "task": case.task,
        "strategy": case.strategy,
        "rows": case.rows,
        "precision": "bf16" if case.use_bf16 else "fp32",
        "step_s": total,
        "row_ms": 1e3 * total / case.rows,
        "row_epochs_per_s": case.rows / total,
        "images_per_s": case.rows * samples / total,
        "train_share": phases["train"] / steps / total,
        "validate_share": phases["validate"] / steps / total,
        "captures": sum(getattr(c.engine, "captures", 0) for c in population.cohorts),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if where.type == "cuda" else None,
    }
    population.close()
    del population, parts
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", nargs="+", default=["cifar_baseline"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--strategies", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--sequential-rows", type=int, default=4, help="rows timed one by one")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for task in options.tasks:
        cases = []
        if "sequential" in options.strategies:
            cases.append(Case(task, "sequential", options.sequential_rows, False))
        for strategy in options.strategies:
            if strategy != "sequential":
                cases += [
                    Case(task, strategy, rows, precision == "bf16")
                    for rows in options.rows
                    for precision in options.precisions
                ]
        for case in cases:
            steps = 1 if case.strategy == "sequential" else options.steps
            results.append(measure(case, options.device, steps, options.batch_size))
            print_row(results)
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    header = [
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
        "ratio",
    ]
    print_table(header, [describe(result, results) for result in results])
    return 0


def describe(result: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    reference = next(
        (r for r in results if r["task"] == result["task"] and r["strategy"] == "sequential"), None
    )
    ratio = "–" if reference is None else f"{reference['row_ms'] / result['row_ms']:.1f}×"
    memory = result["memory_gib"]
    return [
        result["task"],
        result["strategy"],
        str(result["rows"]),
        result["precision"],
        f"{result['row_ms']:.2f}",
        f"{result['row_epochs_per_s']:.1f}",
        f"{result['images_per_s']:,.0f}",
        f"{100 * result['train_share']:.0f} %",
        f"{100 * result['validate_share']:.0f} %",
        "–" if memory is None else f"{memory:.1f}",
        str(result["captures"]),
        ratio,
    ]


def print_row(results: list[dict[str, Any]]) -> None:
    import sys

    print(" ".join(describe(results[-1], results)), file=sys.stderr, flush=True)
