"""Worker processes: one thread each, shared by all populations that need some at the same time.

Starting a process takes seconds, so there is one pool in a program: populations lease it, and the
last one to close ends its processes. Whoever makes populations one after another holds a lease of
its own meanwhile (`lease_pool`). Requests to a process are answered in their order; an answer that
comes before somebody waits for it is kept, and a process that dies is replaced (`handle`).
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import torch.multiprocessing as mp

from esper.kasmina.blueprints.registry import blueprint_names
from esper.lab.population.engine import StrategyError
from esper.lab.population.worker_handle import WorkerError, WorkerHandle

_pools: dict[tuple[int, tuple[str, ...]], WorkerPool] = {}
_leasing = threading.RLock()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system says
        return os.cpu_count() or 1


def may_start_processes() -> bool:
    """Return whether this process may have children: one of a `multiprocessing.Pool` may not."""
    return not mp.current_process().daemon


def has_pool() -> bool:
    """Return whether there are processes to share, so that none has to be started."""
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
    """Processes and the way to talk to them; what they can be asked for is in `process.py`."""

    def __init__(self) -> None:
        """Start with no process at all."""
        self.users = 0
        self._serial = 0
        self._is_broken = False
        self._workers: list[WorkerHandle] = []

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._workers)

    @property
    def is_usable(self) -> bool:
        """Whether none was given up."""
        return not self._is_broken

    @property
    def process_ids(self) -> list[int]:
        """The processes, as the system knows them."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def grow(self, count: int) -> None:
        """Start processes until there are `count` of them, and wait until they are ready."""
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
        """Count one user less; the last one ends the processes."""
        with _leasing:
            self.users -= 1
            if self.users > 0:
                return
            for key in [key for key, pool in _pools.items() if pool is self]:
                del _pools[key]
        self.end()

    def end(self) -> None:
        """End the processes, whoever uses them."""
        self._is_broken = True
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def next_serial(self) -> int:
        """Return a number that nothing else has in this pool."""
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
        """Return what processes answer; take all answers in before one is a failure."""
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
    """End what nobody has released: `multiprocessing` would wait for ever at the program's end."""
    for (owner, _), pool in list(_pools.items()):
        if owner == os.getpid():
            pool.end()


def _key() -> tuple[int, tuple[str, ...]]:
    """Return what processes must agree in: who started them and which blueprints there are."""
    return os.getpid(), blueprint_names()
