"""Runs a function of a test file in two processes at once, as data-parallel training does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORLD = 2

_PROGRAM = """
import importlib, sys, traceback
module, folder, rank = sys.argv[1:]
code = 0
try:
    importlib.import_module(module).play(folder, int(rank))
except BaseException:
    traceback.print_exc()
    code = 1
from tests.growth.two_processes import leave
leave(code)
"""


def leave(code: int = 0) -> None:
    """End this process at once, without freeing anything.

    What is freed after its process group is destroyed, or while the interpreter ends, may hang or
    abort in gloo (PyTorch 2.13), also without Esper.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
