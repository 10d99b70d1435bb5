from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from esper.lab.population import worker_handle as handle
from esper.lab.population.worker_handle import WorkerError, WorkerHandle, send_message
from esper.leyline.errors import EsperWarning

SCRIPT = """
import signal
from multiprocessing import resource_tracker
from esper.lab.population import worker_handle as handle

with handle._holding_signals_back():
    # What the first spawned process does on its way.
    resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert held >= set(handle.PARENTS_SIGNALS), held
assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(handle.PARENTS_SIGNALS)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signal masks")
def test_the_first_worker_starts_with_signals_held_back() -> None:
    """`multiprocessing` starts a process of its own before it, and lets signals in again."""
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


def dying(answers: list[list[Any]]) -> Any:
    """Return a way to start processes, each of which dies when it has said what it has to say."""
    started = iter(answers)

    def start() -> tuple[Any, Any]:
        ours, theirs = multiprocessing.Pipe()
        for answer in next(started):
            send_message(theirs, answer)
        with socket.socket(fileno=os.dup(theirs.fileno())) as end:
            end.shutdown(socket.SHUT_WR)  # what is sent to it is not refused
        process = SimpleNamespace(
            exitcode=-9, join=lambda timeout=None: None, is_alive=lambda: False, keeps=theirs
        )
        return process, ours

    return start


READY = (0, "done", None)


def test_a_process_that_dies_is_replaced_and_told_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [[READY, (1, "done", "opened")], [READY, (-1, "done", [(2, "done", "trained")])]]
    monkeypatch.setattr(handle, "_start", dying(said))
    worker = WorkerHandle(3)
    worker.send(1, "open", (7, [], [], None))
    assert worker.receive(1) == ("done", "opened")
    worker.send(2, "train", (7, [0]))
    with pytest.warns(EsperWarning, match="worker process 3 ended unexpectedly with exit code -9;"):
        assert worker.receive(2) == ("done", "trained")


def test_a_process_that_dies_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_start", dying([[READY]] * (handle.MOST_REPLACEMENTS + 1)))
    worker = WorkerHandle(0)
    worker.send(1, "open", (7, [], [], None))
    with (
        pytest.warns(EsperWarning, match="another one plays its rows again"),
        pytest.raises(WorkerError, match="0 ended unexpectedly 4 times on the same rows, now with"),
    ):
        worker.receive(1)
    with pytest.raises(WorkerError, match="use fewer rows, fewer workers or strategy='sequential'"):
        worker.receive(1)
