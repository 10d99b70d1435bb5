from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import signal
from multiprocessing import resource_tracker
from esper.population.workers import pool

with pool._holding_signals_back():
    # What the first spawned process does on its way.
    resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert held >= set(pool.PARENTS_SIGNALS), held
assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(pool.PARENTS_SIGNALS)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signal masks")
def test_the_first_worker_starts_with_signals_held_back() -> None:
    """`multiprocessing` starts a process of its own before it, and lets signals in again."""
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
