"""Capturing a training step in a CUDA graph and replaying it for the rest of an epoch.

Within an epoch the topology is fixed: the first full batch runs as it is (and warms everything up),
the second is captured, and every later one is one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


class Replay:
    """Runs a step eagerly once, then captures it, then replays it."""

    def __init__(self) -> None:
        """Create a runner that has seen nothing."""
        self.captures = 0
        # A pool lives as long as some graph uses it: this empty one keeps it for all that follow.
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._anchor, pool=self._pool):
            torch.zeros(1, device="cuda")
        self.forget()

    def forget(self) -> None:
        """Drop the captured step: the topology is about to change."""
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._loss: Tensor | None = None

    def run(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        """Carry out one step on these inputs."""
        if not self._warm:
            self._warm = True
            return self._beside(step, x, y)
        if self._graph is None:
            self._x, self._y = still_x, still_y = x.clone(), y.clone()
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may go on: the feed draws the next epoch meanwhile.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._loss = step(still_x, still_y)
            self.captures += 1
        assert self._x is not None
        assert self._y is not None
        assert self._loss is not None
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss

    def _beside(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        """Run on a side stream, as capture will: libraries set up what they need there."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        return result
