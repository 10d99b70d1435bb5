"""A worker process, and the journal of requests that rebuilds its state if it dies.

The state of a process follows from its requests: rows start from their seeds, and the same requests
in the same order give the same numbers. So the parent keeps no copy of the networks but the
requests, as long as the state depends on them. A request that changes nothing is kept until it is
answered.
"""

from __future__ import annotations

import io
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.lab.tasks.splits import Splits
from esper.leyline.errors import EsperError, warn
from esper.utils.process import STOP_SIGNALS

_ASKING = frozenset({"measure", "read", "score", "close", "unload"})
"""Requests that do not change a process."""

_SHELF = frozenset({"load_source", "load", "unload"})
"""Requests about tasks and data; all others are about the rows of one engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was sent."""

    serial: int
    name: str
    about: int
    """Number of its engine, task or source."""
    needs: frozenset[int]
    """Tasks from which it builds rows, or the source of a task."""
    packed: bytes
    """The message; empty if memory has to be shared again with each new process."""
    shared: Any = None
    """A source of data in shared memory."""
    forgets: frozenset[int] = frozenset()
    """Tasks and sources that it unloads."""


def describe(serial: int, name: str, arguments: tuple[Any, ...], packed: bytes) -> Request:
    """Return a request for the journal; `arguments` are those of the method of `_Worker`."""
    needs: Iterable[int] = ()
    match name, arguments:
        case "load_source", (source, shared):
            # Its message can be read once, by one process.
            return Request(serial, name, source, frozenset(), b"", shared=shared)
        case "unload", (conditions, sources):
            forgets = frozenset([*conditions, *sources])
            return Request(serial, name, -1, frozenset(), packed, forgets=forgets)
        case "load", (_, source, *_):
            needs = (source,)
        case "open", (_, conditions, *_):
            needs = conditions
        case "adopt", (_, _, condition, *_):
            needs = (condition,)
    return Request(serial, name, arguments[0], frozenset(needs), packed)


class Journal:
    """The requests that the state of one process depends on, in order."""

    def __init__(self) -> None:
        """Start with a new process."""
        self._requests: dict[int, Request] = {}
        self._unanswered: set[int] = set()
        self._unloaded: set[int] = set()

    def __len__(self) -> int:
        """Return the number of kept requests."""
        return len(self._requests)

    def note(self, request: Request) -> None:
        """Add a request that is about to be sent."""
        self._requests[request.serial] = request
        self._unanswered.add(request.serial)

    @property
    def unloaded(self) -> list[int]:
        """Unloaded tasks and sources that are kept because rows were built from them."""
        return sorted(self._unloaded)

    def answered(self, serial: int) -> None:
        """Mark a request as answered, and drop requests that the state no longer depends on."""
        self._unanswered.discard(serial)
        request = self._requests.get(serial)
        if request is None or request.name not in _ASKING:
            return
        del self._requests[serial]
        if request.name == "close":
            self._drop(
                each
                for each in self._requests.values()
                if each.name not in _SHELF and each.about == request.about
            )
        if request.name in ("close", "unload"):
            self._unloaded |= request.forgets
            self._drop_unloaded()

    def requests(self) -> list[tuple[Request, bool]]:
        """Return the requests for a new process, each with whether an answer is awaited."""
        return [(each, each.serial in self._unanswered) for each in self._requests.values()]

    def _drop_unloaded(self) -> None:
        """Drop unloaded tasks, then sources, that no kept request needs."""
        for name in ("load", "load_source"):
            needed = frozenset[int]().union(*(each.needs for each in self._requests.values()))
            self._drop(
                each
                for each in self._requests.values()
                if each.name == name and each.about in self._unloaded - needed
            )
        self._unloaded &= {each.about for each in self._requests.values() if each.name in _SHELF}

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            del self._requests[request.serial]


# ---- A worker process as its parent sees it: messages, and replacement when it dies


MOST_REPLACEMENTS = 3
"""Replacements of a process on the same rows; after that, the rows are the cause."""

_PATIENCE_S = 5.0

PARENTS_SIGNALS = STOP_SIGNALS
"""Signals that only the parent handles.

A terminal, `timeout` and batch systems send them to all processes of a group. The parent then
finishes and saves the step, for which it needs its workers.
"""


class WorkerError(EsperError, RuntimeError):
    """A worker process failed or ended."""


class WorkerHandle:
    """A worker process, replaced if it dies; requests are answered in order.

    Args:
        number: its number in the pool, for messages.
    """

    def __init__(self, number: int) -> None:
        """Start the process; its answer to request 0 means that it is ready."""
        self._number = number
        self._journal = Journal()
        self._received: dict[int, tuple[str, Any]] = {}
        # Code that needs both locks takes the receiving lock first.
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._replacements = 0
        self._has_ended = False
        self._failure: WorkerError | None = None
        self.process, self._connection = _start()

    def send(self, serial: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Send a request; a dead process is noticed when the answer is awaited."""
        with self._sending:
            packed = pack_message((serial, name, arguments))
            if name == "open":  # other rows
                self._replacements = 0
            self._journal.note(describe(serial, name, arguments, packed))
            try:
                self._connection.send_bytes(packed)
            except OSError:
                return

    def receive(self, serial: int) -> tuple[str, Any]:
        """Wait for the answer to a request: ("done", result) or ("error", reason)."""
        with self._receiving:
            while serial not in self._received:
                try:
                    answer = receive_message(self._connection)
                except (EOFError, OSError):
                    self._replace()
                    continue
                with self._sending:
                    self._keep_answer(answer)
            return self._received.pop(serial)

    def ask_to_end(self) -> None:
        """Ask the process to end after its pending requests."""
        self._has_ended = True
        try:
            send_message(self._connection, None)
            self._connection.close()
        except (OSError, ValueError):
            return  # it has ended already

    def end(self) -> None:
        """Wait for the end of the process, with a time limit."""
        self.process.join(timeout=_PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _replace(self) -> None:
        """Replace a dead process, and replay its requests."""
        while True:
            if self._has_ended:
                raise WorkerError("the worker processes have been ended; reset the population")
            if self._failure is not None:
                raise self._failure
            self.end()
            self._replacements += 1
            if self._replacements > MOST_REPLACEMENTS:
                self._failure = WorkerError(
                    f"worker process {self._number} ended unexpectedly {self._replacements} times "
                    f"on the same rows, now with exit code {self.process.exitcode} (out of "
                    "memory?); use fewer rows, fewer workers or strategy='sequential'"
                )
                raise self._failure
            warn(
                f"worker process {self._number} ended unexpectedly with exit code "
                f"{self.process.exitcode}; another one plays its rows again"
            )
            self._connection.close()
            try:
                with self._sending:
                    self.process, self._connection = _start()
                    self._play_again()
            except (EOFError, OSError):
                continue
            return

    def _play_again(self) -> None:
        """Replay the journal in a new process; keep the answers that are still awaited."""
        self._keep_answer(receive_message(self._connection))  # it is ready
        told: list[tuple[bytes, bool]] = []
        for request, is_awaited in self._journal.requests():
            if request.shared is None:
                told.append((request.packed, is_awaited))
            else:
                words = (request.about, request.shared)
                told.append((pack_message((request.serial, request.name, words)), is_awaited))
        if told:
            send_message(self._connection, (-1, "again", (told, self._journal.unloaded)))
            _, status, answers = receive_message(self._connection)
            assert status == "done", answers
            for answer in answers:
                self._keep_answer(answer)

    def _keep_answer(self, answer: tuple[int, str, Any]) -> None:
        serial, status, value = answer
        self._received[serial] = status, value
        self._journal.answered(serial)


def _start() -> tuple[BaseProcess, Connection]:
    """Start a process that serves requests; return it and the connection to it."""
    from esper.lab.population.worker_pool import serve

    context = mp.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    try:
        with _without_script(), _holding_signals_back():
            process.start()
    finally:
        theirs.close()
    return process, connection


@contextmanager
def _holding_signals_back() -> Iterator[None]:
    """Block the parent's signals while a process starts, until it ignores them itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no such masks
        yield
        return
    # The first spawn also starts the resource tracker, which would otherwise unblock all signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pack_message(message: Any) -> bytes:
    """Return plain data, tensors and sources of data as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def send_message(connection: Connection, message: Any) -> None:
    """Send plain data and tensors through a pipe."""
    connection.send_bytes(pack_message(message))


def receive_message(connection: Connection) -> Any:
    """Receive what `send_message` sent at the other end."""
    return unpack_message(connection.recv_bytes())


def unpack_message(packed: bytes) -> Any:
    """Unpack what `pack_message` returned."""
    return pickle.loads(packed)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, by copy, so that no shared memory stays open.

    The memory of a source of data is shared; each message shares it with one process once.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Splits):
            return pickle.loads, (bytes(ForkingPickler.dumps(obj)),)
        if isinstance(obj, Tensor) and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.detach().cpu().numpy(),)
        return NotImplemented


@contextmanager
def _without_script() -> Iterator[None]:
    """Within the block, hide the user's script.

    A new process imports its parent's script to find its classes. A script that makes a population
    at its top level would otherwise run again in every process, endlessly.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
