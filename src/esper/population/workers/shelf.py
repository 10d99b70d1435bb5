"""What worker processes have loaded: tasks and the sources of their data, each as long as used.

The samples of a source lie in memory that all processes share; it is sent once, however many tasks
are on it. A task travels as its class, its configuration and what it uses of its source.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.hosts import HOSTS
from esper.population.conditions import Condition
from esper.population.engine import StrategyError
from esper.population.workers.handle import WorkerError
from esper.population.workers.pool import WorkerPool
from esper.tasks.splits import Splits
from esper.tasks.task import Task


class WorkerShelf:
    """The tasks and sources that the first `count` processes of a pool have loaded."""

    def __init__(self, pool: WorkerPool, count: int) -> None:
        """Have nothing loaded yet."""
        self._pool, self._count = pool, count
        self._conditions: dict[int, tuple[Condition, int]] = {}
        self._users: Counter[int] = Counter()
        self._sources: dict[int, tuple[Splits, int]] = {}

    def number_of(self, condition: Condition) -> int:
        """Return the number under which processes have a task with its data."""
        return self._conditions[id(condition)][1]

    def use(self, conditions: Iterable[Condition]) -> None:
        """Count one user more of every condition; load what is not there."""
        wanted = {id(condition): condition for condition in conditions}
        new = [condition for name, condition in wanted.items() if name not in self._conditions]
        for condition in new:
            _check_classes(condition.task)
        self._users.update(wanted.keys())
        try:
            self._load(new)
        except BaseException:
            with suppress(WorkerError):  # what is gone has forgotten it
                self.drop(wanted.values())
            raise

    def drop(self, conditions: Iterable[Condition]) -> None:
        """Count one user less of every condition; processes forget what nobody uses."""
        self._users.subtract({id(condition) for condition in conditions})
        self._users = +self._users
        unused = [name for name in self._conditions if name not in self._users]
        numbers = [self._conditions.pop(name)[1] for name in unused]
        needed = {id(condition.data.splits) for condition, _ in self._conditions.values()}
        sources = [name for name in self._sources if name not in needed]
        gone = [self._sources.pop(name)[1] for name in sources]
        if numbers or gone:
            asked = [
                self._pool.ask(process, "unload", numbers, gone) for process in range(self._count)
            ]
            self._pool.answers(dict(enumerate(asked)))

    def _load(self, conditions: Sequence[Condition]) -> None:
        for splits in {id(each.data.splits): each.data.splits for each in conditions}.values():
            if id(splits) not in self._sources:
                self._load_source(splits)
        asked = []
        for condition in conditions:
            number = self._pool.next_serial()
            self._conditions[id(condition)] = condition, number
            asked.append((condition.task, self._ask_to_load(condition, number)))
        for task, serials in asked:
            try:
                self._pool.answers(serials)
            except WorkerError as error:
                if not self._pool.is_usable:
                    raise
                raise _refused(task, error) from error

    def _load_source(self, splits: Splits) -> None:
        number = self._pool.next_serial()
        self._sources[id(splits)] = splits, number
        self._pool.answers(
            {p: self._pool.ask(p, "load_source", number, splits) for p in range(self._count)}
        )

    def _ask_to_load(self, condition: Condition, number: int) -> dict[int, int]:
        source = self._sources[id(condition.data.splits)][1]
        words = (number, source, list(sys.path), blueprint_names(), pack_condition(condition))
        return {p: self._pool.ask(p, "load", *words) for p in range(self._count)}


class _ConditionPickler(pickle.Pickler):
    """Leaves the source out: the other side has it."""

    def __init__(self, buffer: io.BytesIO, splits: Splits) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._splits = splits

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._splits:
            return "splits"
        is_shared = isinstance(obj, Tensor) and obj is self._splits.targets.get("train")
        return "targets" if is_shared else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


class _ConditionUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, splits: Splits) -> None:
        super().__init__(buffer)
        self._splits = splits

    def persistent_load(self, pid: str) -> Any:
        return self._splits if pid == "splits" else self._splits.targets["train"]


def pack_condition(condition: Condition) -> bytes:
    """Return a task and its data as bytes, for processes that have its source."""
    task, data, buffer = condition.task, condition.data, io.BytesIO()
    _ConditionPickler(buffer, data.splits).dump((_classes(task), task.config, data))
    return buffer.getvalue()


def unpack_condition(packed: bytes, splits: Splits) -> Any:
    """Return (classes, the task's configuration, its data) of what `pack_condition` returned."""
    return _ConditionUnpickler(io.BytesIO(packed), splits).load()


def _classes(task: Task) -> list[type]:
    """Return what travels by name: the task, its host, and every blueprint there is."""
    modules = [BLUEPRINTS.get(name).module for name in blueprint_names()]
    blueprints = [module for module in modules if module is not None]
    return [type(task), HOSTS.get(task.config.host).host_class, *blueprints]


def _check_classes(task: Task) -> None:
    """Refuse what has no name that another process could import."""
    for each in _classes(task):
        if each.__module__ == "__main__":
            raise _refused(task, f"{each.__qualname__} is defined in the script itself")
    try:
        pickle.dumps((_classes(task), task.config))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise _refused(task, error) from error


def _refused(task: Task, error: Exception | str) -> StrategyError:
    return StrategyError(
        f"task {task.name!r} cannot be sent to worker processes: {error}; define its classes in a "
        "module of their own or use strategy='sequential'"
    )
