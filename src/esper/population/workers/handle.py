"""One worker process as its parent sees it: how to talk to it, and another one when it dies.

A process may go away at any moment: the system takes its memory, somebody kills it. Then another is
started and told what the first had been told (`journal`), so that its rows are played again from
their seeds, with the same numbers; whoever waits for an answer only waits longer. A process that
dies again and again on the same rows is given up.
"""

from __future__ import annotations

import io
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
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from esper.leyline.errors import EsperError, warn
from esper.leyline.process import STOP_SIGNALS
from esper.population.workers.journal import Journal, describe
from esper.tasks.splits import Splits

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
    from esper.population.workers.process import serve

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
