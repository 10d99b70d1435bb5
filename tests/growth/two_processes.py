"""Runs a function of a test file in two processes at once, as data-parallel training does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORLD = 2

_PROGRAM = """
import importlib, os, sys, traceback
module, folder, rank = sys.argv[1:]
code = 0
try:
    importlib.import_module(module).play(folder, int(rank))
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
# While an interpreter ends, gloo may hang or abort (PyTorch 2.13), also without Esper.
os._exit(code)
"""


def run_in_two(module: str, folder: Path, seconds: float = 200) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of two processes.

    Args:
        module: name of a module; its `play(folder, rank)` is called in both.
        folder: where they meet.
        seconds: after so many both are killed, and the test fails.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, module, str(folder), str(rank)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        ended = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [(p.returncode, *said) for p, said in zip(started, ended, strict=True)]
