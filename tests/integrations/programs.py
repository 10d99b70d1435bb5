"""Running the examples, and small programs, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.plots import same

ROOT = Path(__file__).parents[2]


def run_example(name: str, *options: str) -> str:
    """Run an example in a fresh process and return what it says at its end, with the network."""
    said = run_program([str(ROOT / "examples" / name), *options])
    return said[said.rindex("after ") :].strip()


def run_program(arguments: list[str]) -> str:
    """Run Python in a fresh process and return what it says."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_same(one: Any, other: Any, where: str = "") -> None:
    """Say where two saved states differ, by a bit; the time that epochs took may."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            if key != "seconds":
                check_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            check_same(*pair, f"{where}/{number}")
    else:
        assert isinstance(one, Tensor) == isinstance(other, Tensor), where
        assert same(one, other), where
