"""What a worker process has been told: enough to bring another one to the same state.

Everything a process knows follows from the requests that changed it: rows begin at their seeds,
and the same requests in the same order give the same numbers. So what is kept of a process that
may die is no copy of its networks but the requests themselves, as long as something rests on them.
A request that only asks is kept until it has been answered.
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
"""Requests that nothing rests on once they have been answered."""

_SHELF = frozenset({"load_source", "load", "unload"})
"""Requests about tasks and data; all others are about the rows of one engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was sent."""

    serial: int
    name: str
    about: int
    """The engine, task or source that it is about."""
    needs: frozenset[int]
    """Tasks that rows are built from, or the source of a task."""
    packed: bytes
    """The message; empty where memory is shared anew with every process."""
    shared: Any = None
    """A source of data, whose memory is shared."""
    forgets: frozenset[int] = frozenset()
    """Tasks and sources that nobody will name again."""


def describe(serial: int, name: str, arguments: tuple[Any, ...], packed: bytes) -> Request:
    """Return a request as it is kept; `arguments` are those of the method in `process`."""
    needs: Iterable[int] = ()
    match name, arguments:
        case "load_source", (source, shared):
            # Its message is good for one process and one time.
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
    """The requests that the state of one process rests on, in their order."""

    def __init__(self) -> None:
        """Begin with a process that knows nothing."""
        self._requests: dict[int, Request] = {}
        self._unanswered: set[int] = set()
        self._unloaded: set[int] = set()

    def __len__(self) -> int:
        """Return how many requests are kept."""
        return len(self._requests)

    def note(self, request: Request) -> None:
        """Keep a request that is about to be sent."""
        self._requests[request.serial] = request
        self._unanswered.add(request.serial)

    @property
    def unloaded(self) -> list[int]:
        """Tasks and sources that are kept only for the rows that were built from them."""
        return sorted(self._unloaded)

    def answered(self, serial: int) -> None:
        """Take note that the answer to a request is here; drop what nothing rests on any more."""
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
        """Return what a new process is told, with whether somebody waits for the answer."""
        return [(each, each.serial in self._unanswered) for each in self._requests.values()]

    def _drop_unloaded(self) -> None:
        """Drop tasks, then sources, that were unloaded and that nothing kept needs."""
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


# ---- One worker process as its parent sees it: how to talk to it, and another one when it dies


MOST_REPLACEMENTS = 3
"""How often a process is replaced on the same rows: what dies so often dies of them."""

_PATIENCE_S = 5.0

PARENTS_SIGNALS = STOP_SIGNALS
"""Signals that workers leave to their parent.

A terminal, `timeout` and batch systems send them to all processes of a group. The parent then ends
the step and saves it, and it needs its workers for that.
"""


class WorkerError(EsperError, RuntimeError):
    """A worker process failed or went away."""


class WorkerHandle:
    """A worker process, replaced where it dies; requests to it are answered in their order.

    Args:
        number: which of the pool's processes it is, for messages.
    """

    def __init__(self, number: int) -> None:
        """Start the process; the answer to request 0 says that it is ready."""
        self._number = number
        self._journal = Journal()
        self._received: dict[int, tuple[str, Any]] = {}
        # Whoever needs both takes the lock for receiving first.
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._replacements = 0
        self._has_ended = False
        self._failure: WorkerError | None = None
        self.process, self._connection = _start()

    def send(self, serial: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Send a request; that nobody is there is noticed by whoever waits for the answer."""
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
        """Wait for the answer to a request: ("done", what was asked for) or ("error", why)."""
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
        """Let the process end when it has answered what it was asked."""
        self._has_ended = True
        try:
            send_message(self._connection, None)
            self._connection.close()
        except (OSError, ValueError):
            return  # it is gone already

    def end(self) -> None:
        """Wait for the end of the process, not for ever."""
        self.process.join(timeout=_PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _replace(self) -> None:
        """Start another process in the place of one that is gone, and let it catch up."""
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
        """Tell a new process what the one before it knew; keep the answers nobody has had yet."""
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


def pack_message(message: Any) -> bytes:
    """Return plain data, tensors and sources of data as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def send_message(connection: Connection, message: Any) -> None:
    """Send plain data and tensors through a pipe."""
    connection.send_bytes(pack_message(message))


def receive_message(connection: Connection) -> Any:
    """Return what `send_message` sent at the other end."""
    return unpack_message(connection.recv_bytes())


def unpack_message(packed: bytes) -> Any:
    """Return what `pack_message` packed."""
    return pickle.loads(packed)


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: fast, copied, and no shared memory stays open.

    The memory of a source of data is shared, which is arranged with one process for one time.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Splits):
            return pickle.loads, (bytes(ForkingPickler.dumps(obj)),)
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
