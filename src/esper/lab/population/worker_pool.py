"""The pool of worker processes, shared by all populations, and the code they run.

Each process uses one thread. Starting a process takes seconds, so a program has one pool:
populations lease it, and the last one to close ends the processes. Code that makes one population
after another keeps a lease in between (`lease_pool`). A process answers requests in order, early
answers are kept, and a process that dies is replaced (`worker_handle`).
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.budget import Portion
from esper.kasmina.hosts import HOSTS
from esper.lab.population.engine import Condition, PopulationConfig, StrategyError
from esper.lab.population.sequential import SequentialEngine, make_sequential
from esper.lab.population.worker_handle import (
    PARENTS_SIGNALS,
    WorkerError,
    WorkerHandle,
    receive_message,
    send_message,
    unpack_message,
)
from esper.lab.tasks.splits import Split, Splits
from esper.lab.tasks.task import Task
from esper.leyline.errors import EsperError, reason_of

_pools: dict[tuple[int, tuple[str, ...]], WorkerPool] = {}
_leasing = threading.RLock()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def may_start_processes() -> bool:
    """Return whether this process may start children; one in a `multiprocessing.Pool` may not."""
    return not mp.current_process().daemon


def has_pool() -> bool:
    """Return whether a pool with processes exists."""
    pool = _pools.get(_key())
    return pool is not None and len(pool) > 1 and pool.is_usable


def lease_pool(count: int = 0) -> WorkerPool:
    """Return the program's pool, with at least `count` processes; `release` it when done."""
    with _leasing:
        pool = _pools.get(_key())
        if pool is None or not pool.is_usable:
            pool = _pools[_key()] = WorkerPool()
        pool.users += 1
        try:
            pool.grow(count)
        except BaseException:
            pool.release()
            raise
        return pool


class WorkerPool:
    """Worker processes and their connections; `_Worker` has the requests."""

    def __init__(self) -> None:
        """Start without processes."""
        self.users = 0
        self._serial = 0
        self._is_broken = False
        self._workers: list[WorkerHandle] = []

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._workers)

    @property
    def is_usable(self) -> bool:
        """Whether all processes can be used."""
        return not self._is_broken

    @property
    def process_ids(self) -> list[int]:
        """The system's ids of the processes."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def grow(self, count: int) -> None:
        """Start processes until there are `count`, and wait until they are ready."""
        first = len(self._workers)
        if count > first and not may_start_processes():
            raise StrategyError(
                "this is a daemonic process, which may not start others; "
                "use strategy='sequential' in it"
            )
        for number in range(first, count):
            self._workers.append(WorkerHandle(number))
        for number in range(first, count):
            self.answer(number, 0)

    def release(self) -> None:
        """Release one lease; the last one ends the processes."""
        with _leasing:
            self.users -= 1
            if self.users > 0:
                return
            for key in [key for key, pool in _pools.items() if pool is self]:
                del _pools[key]
        self.end()

    def end(self) -> None:
        """End the processes, even if they are leased."""
        self._is_broken = True
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def next_serial(self) -> int:
        """Return an unused number of this pool."""
        with _leasing:
            self._serial += 1
            return self._serial

    def ask(self, number: int, name: str, *arguments: Any) -> int:
        """Send a request to a process and return the serial number of its answer."""
        serial = self.next_serial()
        self._worker(number).send(serial, name, arguments)
        return serial

    def answer(self, number: int, serial: int) -> Any:
        """Wait for the answer of a process to a request."""
        try:
            status, value = self._worker(number).receive(serial)
        except WorkerError:
            self._is_broken = True
            raise
        if status == "error":
            raise WorkerError(f"a worker process failed: {value}")
        return value

    def answers(self, serials: dict[int, int]) -> dict[int, Any]:
        """Return the answers of processes; receive all of them before raising an error."""
        found, failure = {}, None
        for number, serial in serials.items():
            try:
                found[number] = self.answer(number, serial)
            except WorkerError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return found

    def _worker(self, number: int) -> WorkerHandle:
        if number >= len(self._workers):
            raise WorkerError("the worker processes have been ended; reset the population")
        return self._workers[number]


@atexit.register
def _end_pools() -> None:
    """End pools that are still leased; otherwise `multiprocessing` would wait forever at exit."""
    for (owner, _), pool in list(_pools.items()):
        if owner == os.getpid():
            pool.end()


def _key() -> tuple[int, tuple[str, ...]]:
    """Return the key of a pool: the parent process and the registered blueprints."""
    return os.getpid(), blueprint_names()


# ---- The code of a worker process: tasks with their data, and rows of networks


def serve(connection: Connection) -> None:
    """Answer requests until told to stop."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # They were blocked while the process started.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    torch.set_num_threads(1)
    worker = _Worker()
    try:
        send_message(connection, (0, "done", None))
        while (message := receive_message(connection)) is not None:
            send_message(connection, worker.answer(*message))
            worker.go_on()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has ended
    # Shutting the interpreter down normally takes longer than some epochs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Worker:
    """Tasks and engines of a process; public methods except `answer` and `go_on` are requests."""

    def __init__(self) -> None:
        self._sources: dict[int, Splits] = {}
        self._conditions: dict[int, Condition] = {}
        self._engines: dict[int, SequentialEngine] = {}
        self._ahead: dict[int, tuple[list[Tensor], tuple[Tensor, Tensor | None]]] = {}
        self._trained: list[int] = []

    def answer(self, serial: int, name: str, arguments: tuple[Any, ...]) -> tuple[int, str, Any]:
        """Carry out a request; return its number, "done" or "error", and the result."""
        try:
            return serial, "done", getattr(self, name)(*arguments)
        except Exception as error:
            # The parent gets one line, the log of this process the traceback.
            if not isinstance(error, EsperError):
                traceback.print_exc()
            return serial, "error", reason_of(error)

    def again(
        self, told: list[tuple[bytes, bool]], forgotten: list[int]
    ) -> list[tuple[int, str, Any]]:
        """Replay the requests of an earlier process; return the answers that are awaited.

        Args:
            told: the requests in order, each with whether its answer is awaited.
            forgotten: unloaded tasks and sources from which rows were built.
        """
        answers = [(self.answer(*unpack_message(packed)), awaited) for packed, awaited in told]
        self._trained.clear()
        self.unload(forgotten, forgotten)
        return [answer for answer, is_awaited in answers if is_awaited]

    def load_source(self, number: int, splits: Splits) -> None:
        """Store a source of data under a number; its tensors are shared, not copied."""
        self._sources[number] = splits

    def load(
        self, number: int, source: int, path: list[str], blueprints: tuple[str, ...], packed: bytes
    ) -> None:
        """Store a task under a number, with its data from a source."""
        sys.path[:] = path
        try:
            # Classes travel by name: to unpickle them is to import the modules that register them.
            (task_class, *_), task_config, data = unpack_condition(packed, self._sources[source])
        except (AttributeError, ImportError) as error:
            raise StrategyError(str(error)) from error
        if blueprint_names() != blueprints:
            unknown = set(blueprints) ^ set(blueprint_names()) or set(blueprints)
            raise StrategyError(
                "the blueprints registered here are not those of the population "
                f"({', '.join(sorted(unknown))}); register them where their modules are imported"
            )
        self._conditions[number] = Condition(task_class(task_config), data)

    def unload(self, conditions: list[int], sources: list[int]) -> None:
        """Remove tasks, and sources without other tasks; existing rows keep theirs."""
        for number in conditions:
            self._conditions.pop(number, None)
        for number in sources:
            self._sources.pop(number, None)

    def open(
        self, engine: int, conditions: list[int], keys: list[int], config: PopulationConfig
    ) -> Any:
        """Build rows under a number; return their slots and their host's size."""
        chosen = [self._conditions[number] for number in conditions]
        made = self._engines[engine] = make_sequential(chosen, keys, config)
        return made.slots, made.host_params

    def close(self, engine: int) -> None:
        """Remove rows."""
        self._engines.pop(engine, None)
        self._ahead.pop(engine, None)

    def train(self, engine: int, portions: list[Portion]) -> Any:
        """Train one epoch of an engine's rows."""
        result = self._engines[engine].train(portions)()
        self._trained.append(engine)
        return result

    def measure(self, engine: int, plans: list[Tensor]) -> Any:
        """Return the results of the rows' configurations, and the seconds of every row."""
        rows, ahead = self._engines[engine], self._ahead.pop(engine, None)
        known = ahead is not None and _equal(ahead[0], plans)
        result = ahead[1] if known and ahead is not None else rows.measure(plans)
        return (*result, rows.row_seconds)

    def score(self, engine: int, split: Split) -> Tensor:
        """Return the scores and losses of an engine's rows on a whole split."""
        return self._engines[engine].score(split)

    def read(self, engine: int, rows: list[int]) -> Any:
        """Return the whole state of some rows."""
        return [self._engines[engine].read(row) for row in rows]

    def change(self, engine: int, name: str, *arguments: Any) -> Any:
        """Call a method that changes rows: `sync` or `write`."""
        self._ahead.pop(engine, None)
        return getattr(self._engines[engine], name)(*arguments)

    def adopt(self, engine: int, row: int, condition: int, *network: Any) -> None:
        """Replace a row by another network, given as (key, weights, state)."""
        self._ahead.pop(engine, None)
        key, weights, state = network
        self._engines[engine].adopt(row, key, self._conditions[condition], weights, state)

    def go_on(self) -> None:
        """Evaluate the epoch that was just trained, before it is requested."""
        while self._trained:
            engine = self._trained.pop()
            rows = self._engines[engine]
            plans = rows.usual_plans()
            try:
                self._ahead[engine] = plans, rows.measure(plans)
            except Exception:
                # The request for it will raise the same error, which the parent then receives.
                self._ahead.pop(engine, None)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---- Tasks and their data as bytes, for processes that have the source


class _ConditionPickler(pickle.Pickler):
    """Leaves the source out, because the receiver has it."""

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
    """Pack a task and its data, for processes that have its source."""
    task, data, buffer = condition.task, condition.data, io.BytesIO()
    _ConditionPickler(buffer, data.splits).dump((_classes(task), task.config, data))
    return buffer.getvalue()


def unpack_condition(packed: bytes, splits: Splits) -> Any:
    """Unpack (classes, the task's configuration, its data) from `pack_condition`."""
    return _ConditionUnpickler(io.BytesIO(packed), splits).load()


def _classes(task: Task) -> list[type]:
    """Return the classes that are sent by name: task, host and all blueprints."""
    modules = [BLUEPRINTS.get(name).module for name in blueprint_names()]
    blueprints = [module for module in modules if module is not None]
    return [type(task), HOSTS.get(task.config.host).host_class, *blueprints]


def check_classes(task: Task) -> None:
    """Raise for a class that another process could not import by name."""
    for each in _classes(task):
        if each.__module__ == "__main__":
            raise refused_task(task, f"{each.__qualname__} is defined in the script itself")
    try:
        pickle.dumps((_classes(task), task.config))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise refused_task(task, error) from error


def refused_task(task: Task, error: Exception | str) -> StrategyError:
    """Return the error for a task that another process cannot build."""
    return StrategyError(
        f"task {task.name!r} cannot be sent to worker processes: {error}; define its classes in a "
        "module of their own or use strategy='sequential'"
    )
