"""Training losses, averaged over windows of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esper.growth.depth.wrapping import mean_over_processes

WINDOWS = 100
"""Windows of a run."""
_STEPS = 100
"""Steps of a window where the length of the run is not known."""


class LossWindows:
    """(FLOPs spent, mean loss) of the windows that are over, and the sum of the one that is not."""

    def __init__(self) -> None:
        """Begin with no loss."""
        self.over: list[tuple[float, float]] = []
        self.since_growth = 0
        self._sum: Tensor | None = None
        self._count, self._steps = 0, 0

    def add(
        self, loss: Tensor | float | None, total_steps: int | None, flops: Callable[[], float]
    ) -> bool:
        """Add a step, with its loss where that is known; return whether a window has ended.

        Only then the device is waited for.
        """
        self._steps += 1
        if loss is not None:
            value = torch.as_tensor(loss).detach().float()
            self._sum = value if self._sum is None else self._sum.to(value.device) + value
            self._count += 1
        if self._steps < (_STEPS if total_steps is None else total_steps // WINDOWS):
            return False
        if self._sum is not None:
            self.over.append((flops(), float(mean_over_processes(self._sum / self._count))))
            self.since_growth += 1
        self._sum, self._count, self._steps = None, 0, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers."""
        return {
            "over": [list(window) for window in self.over],
            "since_growth": self.since_growth,
            "sum": None if self._sum is None else float(self._sum),
            "count": self._count,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.over = [(flops, loss) for flops, loss in state["over"]]
        self.since_growth, self._count = state["since_growth"], state["count"]
        self._steps = state["steps"]
        total = state["sum"]
        self._sum = None if total is None else torch.tensor(total, dtype=torch.float32)
