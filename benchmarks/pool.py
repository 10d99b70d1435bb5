"""Run independent measurements in parallel, one torch thread each, with progress.

Results of training differ between processors. A figure that has to hold on all of them is measured
under several instruction sets: `run_under`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tools.instruction_sets import INSTRUCTION_SETS, available

A = TypeVar("A")
R = TypeVar("R")


def _prepare(environment: Mapping[str, str]) -> None:
    # PyTorch reads it when it is loaded, so this comes before the import.
    assert not environment or "torch" not in sys.modules
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)


def run_all(
    work: Callable[[A], R],
    items: Sequence[A],
    jobs: int,
    environment: Mapping[str, str] | None = None,
) -> list[R]:
    """Return `work(item)` for every item, in order; progress and ETA go to standard error.

    Args:
        work: a function that can be pickled.
        items: what it is called with.
        jobs: processes that work side by side.
        environment: variables that these processes have beside those of this one.
    """
    started = time.monotonic()
    results: list[R] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_prepare, initargs=(environment or {},)) as pool:
        for result in pool.imap(work, items):
            results.append(result)
            spent = time.monotonic() - started
            left = spent / len(results) * (len(items) - len(results))
            print(f"\r{len(results)}/{len(items)}  ETA {left:4.0f} s ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return results


def add_sets_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be run under several instruction sets."""
    parser.add_argument(
        "--sets",
        nargs="*",
        choices=tuple(INSTRUCTION_SETS),
        metavar="SET",
        help="instruction sets to measure under; without names, all that this processor has",
    )


def run_under(
    sets: Sequence[str] | None, work: Callable[[A], R], items: Sequence[A], jobs: int
) -> dict[str, list[R]]:
    """Return the results of `run_all` by instruction set.

    Args:
        sets: names of instruction sets, empty for all that this processor has; None runs once, with
            whatever PyTorch chooses.
        work: a function that can be pickled.
        items: what it is called with.
        jobs: processes that work side by side.
    """
    if sets is None:
        return {"as it is": run_all(work, items, jobs)}
    results = {}
    for name in sets or available():
        print(f"instruction set {name}", file=sys.stderr)
        results[name] = run_all(work, items, jobs, INSTRUCTION_SETS[name])
    return results
