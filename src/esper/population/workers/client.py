"""What a population has in worker processes: its tasks with their data, loaded once.

A `WorkerClient` leases processes of the program's pool (`pool`) and is shared by a population and
its forks. It outlives every reset: rows come and go (`engine`), processes and data stay.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.hosts import HOSTS
from esper.population.engine import PopulationConfig, StrategyError
from esper.population.workers.pool import WorkerError, WorkerPool, lease_pool
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task


class WorkerClient:
    """Processes of the program's pool that have the tasks of a population loaded.

    Args:
        tasks: what rows may be of.
        data: the data of every task.
        config: settings shared by all rows.
        count: number of processes.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        data: Sequence[TaskData],
        config: PopulationConfig,
        count: int,
    ) -> None:
        """Lease the processes and let them load the tasks."""
        self.count = count
        self.rows: dict[int, list[int]] = {}
        """By engine: how many rows every process has of it."""
        self.seconds: dict[int, list[float]] = {}
        """By engine: what these rows cost every process, once that is known."""
        self._tasks = list(tasks)
        for task in tasks:
            _check_classes(task, config)
        self.pool: WorkerPool = lease_pool(count)
        self._users = [1]
        self._task_ids = [self.pool.next_serial() for _ in tasks]
        try:
            for task, own, task_id in zip(tasks, data, self._task_ids, strict=True):
                self._load(task, own, config, task_id)
        except BaseException:
            self.release()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether all processes are there, as far as is known."""
        return self._users[0] > 0 and self.pool.is_usable

    def id_of(self, task: Task) -> int:
        """Return the number under which processes have a task."""
        return self._task_ids[self._tasks.index(task)]

    def share(self) -> WorkerClient:
        """Return the same processes for another population, which has engines of its own."""
        other = copy.copy(self)
        other.rows, other.seconds = {}, {}
        self._users[0] += 1
        return other

    def release(self) -> None:
        """Count one user less; after the last one processes forget the data."""
        self._users[0] -= 1
        if self._users[0]:
            return
        try:
            for task_id in self._task_ids:
                asked = [self.pool.ask(process, "unload", task_id) for process in range(self.count)]
                self.pool.answers(dict(enumerate(asked)))
        except WorkerError:
            pass  # what is gone has forgotten it
        self.pool.release()

    def _load(self, task: Task, data: TaskData, config: PopulationConfig, task_id: int) -> None:
        asked = {}
        for process in range(self.count):
            # The data are not copied but shared, which must be arranged with each process.
            packed = ForkingPickler.dumps((_classes(task), task.config, data, config))
            asked[process] = self.pool.ask(
                process, "load", task_id, list(sys.path), blueprint_names(), bytes(packed)
            )
        try:
            self.pool.answers(asked)
        except WorkerError as error:
            if not self.pool.is_usable:
                raise
            raise _refused(task, error) from error


def _classes(task: Task) -> list[type]:
    """Return what travels by name: the task, its host, and every blueprint there is."""
    blueprints = [BLUEPRINTS.get(name).module for name in blueprint_names()]
    return [type(task), HOSTS.get(task.config.host).host_class, *blueprints]


def _check_classes(task: Task, config: PopulationConfig) -> None:
    """Refuse what has no name that another process could import."""
    for each in _classes(task):
        if each.__module__ == "__main__":
            raise _refused(task, f"{each.__qualname__} is defined in the script itself")
    try:
        pickle.dumps((_classes(task), task.config, config))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise _refused(task, error) from error


def _refused(task: Task, error: Exception | str) -> StrategyError:
    return StrategyError(
        f"task {task.name!r} cannot be sent to worker processes: {error}; define its classes in a "
        "module of their own or use strategy='sequential'"
    )
