"""Running independent measurements side by side, one torch thread each, with progress."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def run_all(work: Callable[[A], R], items: Sequence[A], jobs: int) -> list[R]:
    """Return `work(item)` for every item, in order; progress and ETA go to standard error."""
    started = time.monotonic()
    results: list[R] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_one_thread) as pool:
        for result in pool.imap(work, items):
            results.append(result)
            spent = time.monotonic() - started
            left = spent / len(results) * (len(items) - len(results))
            print(f"\r{len(results)}/{len(items)}  ETA {left:4.0f} s ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return results
