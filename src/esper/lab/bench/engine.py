"""Throughput of a population: rates, phases, memory, and its share of the device's peak.

Rows have seeds in about half of their slots (every blueprint and style; blending, fossilized or in
training) and run whole steps: train, validate with all ablations, act. Data are random bytes in the
shape of the task's, as throughput does not depend on the contents. `esper bench` and
`benchmarks/engine.py` print the results.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.budget import Portion
from esper.kasmina.contribution import participating, plan_ablations
from esper.kasmina.engine import EpochResult, EvaluatedEngine
from esper.kasmina.hosts import CnnConfig
from esper.kasmina.state import SlotState
from esper.lab.bench import now
from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.population.task_group import TaskGroup
from esper.lab.tasks.data.source import Source
from esper.lab.tasks.dataset import TaskData, make_data
from esper.lab.tasks.task import Task, get_task
from esper.leyline.actions import placeholder_actions
from esper.leyline.records import Plain
from esper.leyline.stages import AlphaAlgorithm, SeedStage
from esper.utils.process import Pending
from esper.utils.randomness import generator

WIDE = "cifar_wide"
"""Name of the CIFAR task with a 3-block 32-64-128 host, for measurements only."""

RANDOM_SAMPLES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement."""

    task: str
    strategy: Strategy
    rows: int
    use_bf16: bool = False
    batch_size: int | None = None
    """Samples in one optimizer step; the task's by default."""
    samples: int | None = None
    """Samples in one epoch; the task's by default."""
    steps: int = 3
    """Timed steps, after the warm-up."""
    has_seeds: bool = True
    """Whether about half of the slots have seeds, or none."""
    warm_up: int = 0
    """Warm-up steps on the CPU; a CUDA device always has two."""
    first_row: int = 0
    """Number of the first row; a row has the same weights, seeds and batches in every case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Plain):
    """Results of a measurement; times are means over the steps."""

    task: str
    strategy: Strategy
    rows: int
    precision: str
    step_s: float
    """Seconds of one step of all rows."""
    row_ms: float
    """Milliseconds of one step, per row."""
    row_epochs_per_s: float
    images_per_s: float
    """Training samples per second, validation and everything else included."""
    train_s: float
    validate_s: float
    other_s: float
    """Acting, lifecycle, statistics, governor and signals.

    On a GPU phases overlap. These three times are of steps that wait for each phase, so their sum
    is longer than a step.
    """
    captures: int
    """Number of captured step graphs, warm-up included."""
    memory_gib: float | None
    """Most device memory held at once; None on the CPU."""
    tflops: float
    """10^12 operations of hosts and seeds per second."""
    matmul_share: float
    """The same as a share of the device's rate in a large matrix product."""


def measure(case: Case, device: str = "auto", *, matmul_rate: float | None = None) -> Throughput:
    """Run a case and return its rates; `matmul_rate`, operations per second, is measured if None.

    On the CPU it uses one thread.
    """
    task = measured_task(case.task, case.batch_size, case.samples)
    data = random_data(task)
    population = grown_population(task, data, case, device)
    where = population.device
    try:
        # The first steps on a GPU load kernels, choose algorithms and fill the allocator.
        _live_steps(population, 2 if where.type == "cuda" else case.warm_up)
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
        step_s = _live_steps(population, case.steps) / case.steps
        clocks = [PhaseClock(group.engine, where) for group in population.groups]
        clocked_s = _live_steps(population, case.steps) / case.steps
        operations = sum(step_flops(group, len(data.subset)) for group in population.groups)
        if matmul_rate is None:
            matmul_rate = measure_matmul(where, use_bf16=case.use_bf16)
        train_s = sum(clock.train_s for clock in clocks) / case.steps
        validate_s = sum(clock.validate_s for clock in clocks) / case.steps
        return Throughput(
            task=case.task,
            strategy=population.strategy,
            rows=case.rows,
            precision="bf16" if case.use_bf16 else "fp32",
            step_s=step_s,
            row_ms=1e3 * step_s / case.rows,
            row_epochs_per_s=case.rows / step_s,
            images_per_s=case.rows * data.samples_per_step / step_s,
            train_s=train_s,
            validate_s=validate_s,
            other_s=max(0.0, clocked_s - train_s - validate_s),
            captures=sum(clock.captures for clock in clocks),
            memory_gib=torch.cuda.max_memory_allocated(where) / 2**30
            if where.type == "cuda"
            else None,
            tflops=operations / step_s / 1e12,
            matmul_share=operations / step_s / matmul_rate,
        )
    finally:
        population.close()
        del population
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def _live_steps(population: Population, steps: int) -> float:
    """Run some steps without actions, and return their duration in seconds."""
    waiting, started = placeholder_actions(population.rows), now(population.device)
    for _ in range(steps):
        population.step(waiting)
    return now(population.device) - started


def make_cases(
    tasks: Sequence[str],
    strategies: Sequence[Strategy],
    rows: Sequence[int],
    precisions: Sequence[str],
    *,
    reference: Mapping[str, Any] | None,
    **shared: Any,
) -> list[Case]:
    """Return the cases: for every task the sequential reference, then all combinations.

    `reference` has the settings of the sequential reference; None leaves it out. An unknown task
    raises before anything is measured.
    """
    cases = []
    for task in tasks:
        measured_task(task)
        if reference is not None:
            cases.append(Case(**{"task": task, "strategy": "sequential", **shared, **reference}))
        cases += [
            Case(task=task, strategy=strategy, rows=n, use_bf16=precision == "bf16", **shared)
            for strategy in strategies
            if strategy != "sequential"
            for n in rows
            for precision in precisions
        ]
    return cases


def ratios(results: Sequence[Throughput]) -> list[float | None]:
    """Return the speed-up per row over the sequential rows of the same task."""
    reference = {
        result.task: result.row_ms
        for result in reversed(results)
        if result.strategy == "sequential"
    }
    return [
        reference[result.task] / result.row_ms if result.task in reference else None
        for result in results
    ]


def measured_task(name: str, batch_size: int | None = None, samples: int | None = None) -> Task:
    """Return a task by name, also `WIDE`, with another batch size or a shorter epoch."""
    changes: dict[str, Any] = {}
    if batch_size is not None:
        changes["batch_size"] = batch_size
    if samples is not None:
        changes["samples_per_step"] = samples
    if name == WIDE:
        return get_task("cifar_baseline", host_options=CnnConfig(channels=(32, 64, 128)), **changes)
    return get_task(name, **changes)


def random_data(task: Task, samples: int = RANDOM_SAMPLES) -> TaskData:
    """Return random samples and targets in the shape of a task's."""
    rng, config = np.random.default_rng(0), task.config
    shape, y = config.input_shape, None
    if config.objective == "language":
        x = rng.integers(0, config.num_classes or 2, (samples, shape[0] + 1)).astype(np.uint8)
    else:
        x = rng.integers(0, 256, (samples, *shape), dtype=np.uint8)
        y = rng.integers(0, config.num_classes or 10, samples)
        if config.objective == "regression":
            outputs = task.build_host(0)(task.example_input()).shape[-1]
            y = rng.standard_normal((samples, outputs)).astype(np.float32)
    return make_data(
        Source("random bytes", "memory", x, y, num_classes=config.num_classes),
        samples_per_step=config.samples_per_step,
        augmentation=config.augment,
        validation_samples=config.validation_samples,
    )


def grown_population(task: Task, data: TaskData, case: Case, device: str = "auto") -> Population:
    """Return the population of a case, before its first step."""
    population = Population(
        task,
        case.rows,
        1,
        device,
        case.strategy,
        data=[data],
        config=PopulationConfig(use_bf16=case.use_bf16),
        row_seeds=range(case.first_row, case.first_row + case.rows),
    )
    population.build()
    for group in population.groups:
        group.start(half_grown(group) if case.has_seeds else None)
    return population


def half_grown(group: TaskGroup) -> SlotState:
    """Return the group's state with random seeds in about half of its slots."""
    stages = (SeedStage.BLENDING, SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.TRAINING)
    shape, fits = group.state.stage.shape, group.table.fits()
    chosen = torch.zeros(shape, dtype=torch.bool)
    stage, blueprint, algorithm = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for row, key in enumerate(group.keys):
        stream = generator(key, "half grown")

        def draw(choices: Sequence[int], stream: torch.Generator = stream) -> int:
            return int(choices[int(torch.randint(len(choices), (), generator=stream))])

        for slot in range(shape[1]):
            chosen[row, slot] = bool(draw([0, 1]))
            stage[row, slot] = draw(stages)
            blueprint[row, slot] = draw(fits[row, slot].nonzero().flatten().tolist())
            algorithm[row, slot] = draw(list(AlphaAlgorithm))
    alpha = torch.where(stage == int(SeedStage.TRAINING), 0.0, 0.5).double()
    return group.state.where(
        chosen, stage=stage, blueprint=blueprint, algorithm=algorithm, alpha=alpha
    )


def step_flops(group: TaskGroup, validation_samples: int) -> int:
    """Return the operations of one step: three forward passes for training, one per ablation."""
    trained = 3 * group.conditions[0].data.samples_per_step
    members = participating(group.state).tolist()
    passes = [trained + validation_samples * len(plan_ablations(row)) for row in members]
    return sum(a * b for a, b in zip(passes, group.signals().flops.tolist(), strict=True))


def measure_matmul(
    device: torch.device, *, use_bf16: bool = False, size: int | None = None
) -> float:
    """Return the operations per second of a large square matrix product, the best of five."""
    size = size or (8192 if device.type == "cuda" else 1024)
    dtype = torch.bfloat16 if use_bf16 else torch.float32
    a = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(6):
        started = now(device)
        torch.mm(a, a)
        times.append(now(device) - started)
    return 2 * size**3 / min(times[1:])


class PhaseClock:
    """Times `train` and `measure` of an engine, waiting for the device after each."""

    def __init__(self, engine: EvaluatedEngine, device: torch.device) -> None:
        """Wrap the engine's two methods."""
        self._engine = engine
        self.train_s = self.validate_s = 0.0
        train, measure = engine.train, engine.measure

        def timed_train(portions: Sequence[Portion]) -> Pending[EpochResult]:
            started = now(device)
            result = train(portions)()
            self.train_s += now(device) - started
            return lambda: result

        def timed_measure(plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
            started = now(device)
            result = measure(plans)
            self.validate_s += now(device) - started
            return result

        engine.train = timed_train  # type: ignore[method-assign]
        engine.measure = timed_measure  # type: ignore[method-assign]

    @property
    def captures(self) -> int:
        """Number of step graphs captured so far."""
        return int(getattr(self._engine, "captures", 0))
