"""A grown network against its twin, and against a static one that had its final size all along.

The static network is the same host made wider until it has as many parameters, trained from
scratch; its learning rate is tuned on the validation split, as the host's was. A network and its
twin share weights and batches and are compared pair by pair; a static one shares neither, so that
there medians are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from esper.growth.build import task_config, task_run
from esper.growth.run import GrowthConfig
from esper.leyline.actions import placeholder_actions
from esper.leyline.records import RunSummary
from esper.population.population import Population
from esper.proof.static import widened
from esper.simic.training.recipes import LIFE
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task

RATES = (0.05, 0.1, 0.2, 0.4)
"""Learning rates that are tried for a network that only waits."""
LAST = 3
"""Epochs over which validation scores are averaged to choose a rate: one alone is noisy."""

_STEP, _MOST = 0.05, 8.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What one kind of network came to, seed by seed."""

    name: str
    test: list[float]
    parameters: int
    """Of one network; the median where seeds grew differently."""
    flops: int
    """Operations of one sample's forward pass, likewise."""

    def gain(self, over: Standing) -> float:
        """Return the median of the paired differences in test score; for a network and its twin."""
        return median(own - other for own, other in zip(self.test, over.test, strict=True))

    def lead(self, over: Standing) -> float:
        """Return the difference of the median test scores, for networks that share nothing."""
        return median(self.test) - median(over.test)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Networks of one task that only waited."""

    task: Task
    val: list[float]
    """Mean validation score of the last epochs, by seed."""
    test: list[float]


def wait(tasks: Sequence[Task], seeds: Sequence[int], data: TaskData) -> list[Waiting]:
    """Train networks that never grow, side by side; the tasks share horizon and data."""
    population = Population(
        list(tasks),
        [len(seeds)] * len(tasks),
        device="cpu",
        strategy="stacked",
        data=[data] * len(tasks),
        row_seeds=tuple(seeds) * len(tasks),
    )
    try:
        idle = placeholder_actions(population.rows)
        scores = [population.reset().val_score.tolist()]
        while len(scores) < tasks[0].config.horizon:
            scores.append(population.step(idle).val_score.tolist())
        test = population.test_scores().tolist()
    finally:
        population.close()
    val = [fmean(each) for each in zip(*scores[-LAST:], strict=True)]
    count = len(seeds)
    parts = [slice(start, start + count) for start in range(0, len(val), count)]
    return [Waiting(task, val[own], test[own]) for task, own in zip(tasks, parts, strict=True)]


def tune(
    task: Task, seeds: Sequence[int], data: TaskData, rates: Sequence[float] = RATES
) -> list[Waiting]:
    """Return the networks of a task at every rate, those with the best median validation first."""
    tasks = [type(task)(task.config.replace(learning_rate=rate)) for rate in rates]
    return sorted(wait(tasks, seeds, data), key=lambda found: -median(found.val))


def of_size(task: Task, parameters: int) -> Task:
    """Return the task whose host is widened to the number of parameters nearest to this one."""
    rate = task.config.learning_rate
    factors = [1.0 + _STEP * step for step in range(round((_MOST - 1.0) / _STEP))]
    wider = (widened(task, factor, rate) for factor in factors)
    return min(wider, key=lambda each: abs(each.host_parameters - parameters))


def settings_of(task: Task, seed: int) -> GrowthConfig:
    """Return how a network of a task is grown here: its seeds live as in our recipes.

    It is compared with static networks at the end of their training, so its last epoch counts too.
    """
    settings = task_config(task, seed=seed, keep="last")
    return settings.replace(garden=settings.garden.replace(lifecycle=LIFE))


def grow_once(task: Task, data: TaskData, seed: int, controller: str) -> RunSummary:
    """Grow one network of a task beside its twin."""
    run = task_run(task, data, config=settings_of(task, seed), controller=controller)
    for _ in run.epochs():
        pass
    return run.finish().summary


def compare(
    task: Task, grown: Sequence[RunSummary], data: TaskData
) -> tuple[Standing, Standing, Standing]:
    """Return twin, grown and static network of a few runs that differ in their seeds alone."""
    seeds = [summary.seed for summary in grown]
    size = round(median(summary.parameters_after for summary in grown))
    static = tune(of_size(task, size), seeds, data)[0]
    first = grown[0]
    twins = [summary.twin_test_score for summary in grown]
    tested = [summary.test_score for summary in grown]
    return (
        Standing("twin (only waits)", _known(twins), first.parameters_before, first.flops_before),
        Standing("grown", _known(tested), size, round(median(s.flops_after for s in grown))),
        Standing(
            f"static, rate {static.task.config.learning_rate:g}",
            static.test,
            static.task.host_parameters,
            static.task.host_flops,
        ),
    )


def _known(scores: Sequence[float | None]) -> list[float]:
    known = [score for score in scores if score is not None]
    assert len(known) == len(scores), "every run was tested, and its twin"
    return known
