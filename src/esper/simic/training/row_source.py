"""Where the rows of a round come from: populations on tasks and families, or a given environment.

The trainer asks a `RowSource` for the plan and the environment of every round; twins and
evaluations take their populations from the same `TaskRows`, and so share the data it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.leyline.actions import Actions
from esper.leyline.blueprints import BUILTIN_BLUEPRINTS
from esper.leyline.process import choose_device
from esper.leyline.randomness import derive_seed
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.population.population import Population
from esper.population.workers.pool import WorkerPool, lease_pool
from esper.simic.training.config import TrainConfig
from esper.simic.training.plan import RoundPlan, draw_env_seeds
from esper.tasks.dataset import TaskData
from esper.tasks.family import FAMILIES, make_family
from esper.tasks.task import Task, get_task


class Environment(Protocol):
    """Rows of evolving hosts: `esper.Population`, or a problem whose optimum is known."""

    rows: int
    """Number of rows."""
    num_slots: int
    """Slots of the row with the most of them."""
    device: torch.device
    """Where signals come from."""

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row afresh, from these seeds if any are given, and live one epoch."""
        ...

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and live through the epoch that follows."""
        ...

    def masks(self) -> Masks:
        """Return what is legal now."""
        ...

    def panics(self) -> Tensor:
        """Return int64 [R]: why the governor took a row back in the last epoch, a `Panic`."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        ...

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot."""
        ...

    def close(self) -> None:
        """Free what must be freed by hand."""
        ...


EVALUATION_SEEDS = 1 << 31
"""First environment seed of evaluations; those of training are all below."""


class RowSource(Protocol):
    """Plans and makes the rows of rounds."""

    device: torch.device
    """Where signals come from."""
    blueprint_names: tuple[str, ...]
    """Name of every blueprint at the index that is its id."""
    num_slots: int
    """Most slots that a row of any round has."""

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return the rows of a round."""
        ...

    def environment(self, round_number: int, stage: int) -> Environment:
        """Return an environment for the rows of a round; the one before it may be closed."""
        ...

    def close(self) -> None:
        """Free what must be freed by hand."""
        ...


class GivenRows:
    """The same environment in every round, such as a problem whose optimum is known."""

    def __init__(self, environment: Environment, config: TrainConfig) -> None:
        """Take the environment as it is."""
        self._environment, self._config = environment, config
        self.device = environment.device
        self.num_slots = environment.num_slots
        self.blueprint_names = BUILTIN_BLUEPRINTS

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return fresh environment seeds for the same rows."""
        config, rows = self._config, self._environment.rows
        seeds = draw_env_seeds(
            config.seed,
            round_number,
            [rows],
            rows_per_seed=config.rows_per_seed,
            pool=config.seed_pool,
        )
        name = type(self._environment).__name__
        return RoundPlan(
            round=round_number,
            tasks=(name,) * rows,
            env_seeds=seeds,
            slot_names={name: SlotConfig.of(self.num_slots).slot_ids},
        )

    def environment(self, round_number: int, stage: int) -> Environment:
        """Return the environment."""
        return self._environment

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one task."""

    task: Task
    label: str
    """Name of the task, or of the member of a family."""
    rows: int


class TaskRows:
    """Populations on the tasks and families of a configuration."""

    def __init__(self, config: TrainConfig) -> None:
        """Look the tasks up; no data is read and nothing is built yet."""
        self._config = config
        self._population: Population | None = None
        self._pool: WorkerPool | None = None
        self._labels: tuple[str, ...] = ()
        self._data: dict[str, TaskData] = {}
        stages = [self._members(stage.tasks) for stage in config.stages]
        self.num_slots = max(slots for members in stages for _, slots in members)
        self.device = choose_device(config.device)
        self.blueprint_names = Population.known_blueprints()

    def groups(self, round_number: int, stage: int) -> list[RowGroup]:
        """Return the tasks of a round and their rows; members of a family are drawn for it."""
        config = self._config
        tasks: list[tuple[str, Task]] = []
        for index, name in enumerate(config.stages[stage].tasks):
            if name not in FAMILIES:
                tasks.append((name, get_task(name)))
                continue
            family = make_family(name)
            for number in range(config.variants_per_round):
                drawn = derive_seed(config.seed, round_number, index, number, "variant")
                tasks.append(family.draw(drawn))
        # A row for every task as far as there are rows; the first tasks have one more.
        tasks = tasks[: config.rows]
        share, more = divmod(config.rows, len(tasks))
        return [
            RowGroup(task, label, share + (index < more))
            for index, (label, task) in enumerate(tasks)
        ]

    def read_data(self) -> None:
        """Read what the first round needs, so that missing data is found before anything else."""
        for group in self.groups(0, 0):
            self._load(group)

    def plan(self, round_number: int, stage: int) -> RoundPlan:
        """Return the rows of a round."""
        config, groups = self._config, self.groups(round_number, stage)
        seeds = draw_env_seeds(
            config.seed,
            round_number,
            [group.rows for group in groups],
            rows_per_seed=config.rows_per_seed,
            pool=config.seed_pool,
        )
        tasks = tuple(group.label for group in groups for _ in range(group.rows))
        return RoundPlan(
            round=round_number,
            tasks=tasks,
            env_seeds=seeds,
            slot_names={group.label: tuple(group.task.slot_paths) for group in groups},
        )

    def environment(self, round_number: int, stage: int) -> Population:
        """Return the population of a round; it is kept while the tasks stay the same."""
        groups = self.groups(round_number, stage)
        labels = tuple(group.label for group in groups)
        if self._population is None or labels != self._labels:
            if self._population is not None:
                self._population.close()
            self._data = {name: data for name, data in self._data.items() if name in labels}
            self._population, self._labels = self.make(groups), labels
        return self._population

    def evaluation(self, numbers: Sequence[int]) -> tuple[RoundPlan, Population]:
        """Return a new population on seeds that training never draws, and its plan.

        Every task of the last stage has a row for each number; of a family, each number is a
        member of its own.
        """
        groups: list[RowGroup] = []
        for name in self._config.stages[-1].tasks:
            if name not in FAMILIES:
                groups.append(RowGroup(get_task(name), name, len(numbers)))
                continue
            family = make_family(name)
            drawn = [family.draw(derive_seed(number, "evaluation member")) for number in numbers]
            groups += [RowGroup(task, label, 1) for label, task in drawn]
        seeds = [EVALUATION_SEEDS + number for number in numbers]
        tasks = len(self._config.stages[-1].tasks)
        plan = RoundPlan(
            round=0,
            tasks=tuple(group.label for group in groups for _ in range(group.rows)),
            env_seeds=tuple(seeds * tasks),
            slot_names={group.label: tuple(group.task.slot_paths) for group in groups},
        )
        return plan, self.make(groups, plan.env_seeds)

    def make(
        self, groups: Sequence[RowGroup], row_seeds: Sequence[int] | None = None
    ) -> Population:
        """Return a new population of these rows, which share the data they read."""
        config = self._config
        population = Population(
            [group.task for group in groups],
            [group.rows for group in groups],
            seed=config.seed,
            device=str(self.device),
            strategy=config.strategy,
            horizon=config.epochs,
            data=[self._load(group) for group in groups],
            config=config.population,
            row_seeds=row_seeds,
        )
        if population.strategy == "workers" and self._pool is None:
            # Populations come and go; their processes stay until this is closed.
            self._pool = lease_pool()
        return population

    def close(self) -> None:
        """Close the population in use and end its processes."""
        if self._population is not None:
            self._population.close()
        self._population = None
        if self._pool is not None:
            self._pool.release()
        self._pool = None

    def _load(self, group: RowGroup) -> TaskData:
        if group.label not in self._data:
            self._data[group.label] = group.task.load(self._config.data, device=self.device)
        return self._data[group.label]

    @staticmethod
    def _members(names: Sequence[str]) -> list[tuple[str, int]]:
        """Return the most slots of every task or family, refusing names that are neither."""
        return [
            (name, make_family(name).max_slots if name in FAMILIES else _slots_of(name))
            for name in names
        ]


def _slots_of(name: str) -> int:
    return len(get_task(name).slot_paths)
