"""Worker processes: one thread each, shared by all populations that need some at the same time.

Starting a process takes seconds, so there is one pool in a program: populations lease it, and the
last one to close ends its processes. Whoever makes populations one after another holds a lease of
its own meanwhile (`lease_pool`). Requests to a process are answered in their order; an answer that
comes before somebody waits for it is kept.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.leyline.errors import EsperError
from esper.leyline.process import STOP_SIGNALS
from esper.population.engine import StrategyError

_PATIENCE_S = 5.0

PARENTS_SIGNALS = STOP_SIGNALS
"""Signals that workers leave to their parent.

A terminal, `timeout` and batch systems send them to all processes of a group. The parent then ends
the step and saves it, and it needs its workers for that.
"""

_pools: dict[tuple[int, tuple[str, ...]], WorkerPool] = {}
_leasing = threading.RLock()


class WorkerError(EsperError, RuntimeError):
    """A worker process failed or went away."""


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
        self._workers: list[_WorkerHandle] = []

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._workers)

    @property
    def is_usable(self) -> bool:
        """Whether all processes are there, as far as is known."""
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
        for _ in range(first, count):
            self._workers.append(_WorkerHandle())
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
        try:
            self._workers[number].send((serial, name, arguments))
        except (OSError, IndexError):
            raise self._lost(number) from None
        return serial

    def answer(self, number: int, serial: int) -> Any:
        """Wait for the answer of a process to a request."""
        try:
            status, value = self._workers[number].receive(serial)
        except (EOFError, OSError, IndexError):
            raise self._lost(number) from None
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

    def _lost(self, number: int) -> WorkerError:
        self._is_broken = True
        if number >= len(self._workers):
            return WorkerError("the worker processes have been ended; reset the population")
        process = self._workers[number].process
        process.join(timeout=_PATIENCE_S)
        return WorkerError(
            f"worker process {number} ended unexpectedly with exit code {process.exitcode} (out of "
            "memory?); reset the population, with fewer rows or strategy='sequential'"
        )


class _WorkerHandle:
    """One process and the connection to it."""

    def __init__(self) -> None:
        from esper.population.workers.process import serve

        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._received: dict[int, tuple[str, Any]] = {}
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs,), daemon=True)
        try:
            with _without_script(), _holding_signals_back():
                self.process.start()
        finally:
            theirs.close()

    def send(self, message: Any) -> None:
        with self._sending:
            send_message(self._connection, message)

    def receive(self, serial: int) -> tuple[str, Any]:
        with self._receiving:
            while serial not in self._received:
                came, status, value = receive_message(self._connection)
                self._received[came] = status, value
            return self._received.pop(serial)

    def ask_to_end(self) -> None:
        try:
            self.send(None)
            self._connection.close()
        except (OSError, ValueError):
            return  # it is gone already

    def end(self) -> None:
        self.process.join(timeout=_PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _holding_signals_back() -> Iterator[None]:
    """Keep the parent's signals from a process that starts, until it ignores them by itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no such masks
        yield
        return
    # The first process that is spawned starts this one before it, which then lets all signals in.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@atexit.register
def _end_pools() -> None:
    """End what nobody has released: `multiprocessing` would wait for ever at the program's end."""
    for (owner, _), pool in list(_pools.items()):
        if owner == os.getpid():
            pool.end()


def send_message(connection: Connection, message: Any) -> None:
    """Send plain data and tensors through a pipe."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(buffer.getbuffer())


def receive_message(connection: Connection) -> Any:
    """Return what `send_message` sent at the other end."""
    return pickle.loads(connection.recv_bytes())


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: fast, copied, and no shared memory stays open."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.detach().cpu().numpy(),)
        return NotImplemented


@contextmanager
def _without_script() -> Iterator[None]:
    """Hide the user's script for a moment.

    A new process imports the script its parent was started from, in order to know its classes. A
    script that makes a population at its top would run again in every process, without end.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _key() -> tuple[int, tuple[str, ...]]:
    """Return what processes must agree in: who started them and which blueprints there are."""
    return os.getpid(), blueprint_names()
