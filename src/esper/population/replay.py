"""Capturing a training step in a CUDA graph and replaying it.

A step works on tensors that stay where they are; what changes between batches and epochs are the
numbers in them. So one graph serves until some tensor has to be moved: the first batch runs as it
is (and warms everything up), the second is captured, and every later one is one launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

Step = Callable[[], None]


class Replay:
    """Runs a step eagerly once, then captures it, then replays it."""

    def __init__(self) -> None:
        """Create a runner that has seen nothing."""
        self.captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop the captured step: something it works on has moved."""
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Step) -> None:
        """Carry out one step."""
        if not self._warm:
            self._warm = True
            self._beside(step)
            return
        if self._graph is None:
            self._graph = _capture(step)
            self.captures += 1
        self._graph.replay()

    def _beside(self, step: Step) -> None:
        """Run on a side stream, as capture will: libraries set up what they need there."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)


def _capture(step: Step) -> torch.cuda.CUDAGraph:
    """Return the step as a graph."""
    graph = torch.cuda.CUDAGraph()
    # A collection in the middle could free what an earlier graph or a pinned buffer left in a
    # cycle; CUDA forbids that during a capture, which is then lost.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        # Other threads may go on: the feed draws the next epoch meanwhile.
        with torch.cuda.graph(graph, pool=_pool()[0], capture_error_mode="thread_local"):
            step()
    finally:
        if was_collecting:
            gc.enable()
    return graph


@lru_cache(maxsize=1)
def _pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """Return the memory that all graphs share: one runs at a time, and none keeps anything there.

    A pool lives as long as some graph uses it; the empty one beside it keeps it.
    """
    pool = torch.cuda.graph_pool_handle()
    anchor = torch.cuda.CUDAGraph()
    with torch.cuda.graph(anchor, pool=pool):
        torch.zeros(1, device="cuda")
    return pool, anchor
