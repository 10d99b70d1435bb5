"""Capturing a training step, or a pass over validation data, in a CUDA graph and replaying it.

A step works on tensors that stay where they are; what changes between batches and epochs are the
numbers in them. So one graph serves until some tensor has to be moved: the first batch runs as it
is (and warms everything up), the second is captured, and every later one is one launch. Used by
`StackedEngine` for training and by `ValidationPass`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from esper.leyline.process import without_collections

Step = Callable[[], None]


class GraphReplay:
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
            self._run_beside(step)
            self._warm = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on: the sampler draws the next epoch meanwhile.
            capture = torch.cuda.graph(graph, pool=_pool()[0], capture_error_mode="thread_local")
            with without_collections(), capture:
                step()
            self._graph = graph
            self.captures += 1
        self._graph.replay()

    def _run_beside(self, step: Step) -> None:
        """Run on a side stream, as capture will: libraries set up what they need there."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)


@lru_cache(maxsize=1)
def _pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """Return the memory that all graphs share.

    One graph runs at a time, and what it leaves there is read before the next one runs. A pool
    lives as long as some graph uses it; the empty one returned with it keeps it.
    """
    pool = torch.cuda.graph_pool_handle()
    anchor = torch.cuda.CUDAGraph()
    with torch.cuda.graph(anchor, pool=pool):
        torch.zeros(1, device="cuda")
    return pool, anchor
