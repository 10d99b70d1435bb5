"""Running scales: one for the rewards of a round, one for the returns the critic learns.

Neither subtracts a mean: a mean would pay rows for staying alive, and move the zero that
"better than waiting" is measured from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import NonFiniteError, UsageError

REWARD_CLIP = 10.0
"""Largest reward of one step in units of a typical return."""

WARM_UP = 32
MOMENTUM = 0.99
_LEAST_STD = 1e-4


class RewardScale:
    """What rewards are divided by: the root mean square of the returns of all episodes so far.

    It is learned from whole rounds and stays what it is within one, so that all rewards of a round
    are in one unit. A deviation that follows the steps would not do: the first steps pay nothing
    but rent, and measured by that, whatever comes first looks hundreds of times too large.

    Args:
        device: where the statistics are kept.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start without any return seen."""
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.squares = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def unit(self) -> Tensor:
        """float32, what rewards are divided by; 1 while all returns are 0."""
        size = (self.squares / self.count.clamp(min=1)).sqrt()
        return torch.where(size < _LEAST_STD, 1.0, size).to(torch.float32)

    def update(self, returns: Tensor) -> None:
        """Learn from the raw returns [N] of a round; what is not finite teaches nothing."""
        values = returns.detach().to(self.squares)
        values = values[torch.isfinite(values)]
        self.count = self.count + len(values)
        self.squares = self.squares + values.square().sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {name: getattr(self, name).clone() for name in ("count", "squares")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these statistics."""
        for name in ("count", "squares"):
            setattr(self, name, state[name].to(self.count).clone())


class ValueNormalizer:
    """The running deviation of returns: the critic learns returns divided by it.

    The first returns set it as soon as there are enough of them; after that it follows slowly.

    Args:
        warm_up: returns to see before the scale is anything but 1.
        momentum: share of the old variance that an update keeps after that.
        device: where the statistics are kept.
    """

    def __init__(
        self,
        warm_up: int = WARM_UP,
        momentum: float = MOMENTUM,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with a scale of 1."""
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum must be 0 or more and below 1, got {momentum}")
        self.warm_up, self.momentum = warm_up, momentum
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.variance = torch.ones((), dtype=torch.float64, device=device)

    @property
    def scale(self) -> Tensor:
        """float32, what returns are divided by."""
        return self.variance.sqrt().clamp(min=_LEAST_STD).to(torch.float32)

    def update(self, returns: Tensor) -> None:
        """Learn from the returns [N] of a round.

        Raises:
            NonFiniteError: A return is NaN or infinite; the scale is left as it was.
        """
        if not returns.numel():
            return
        values = returns.detach().to(torch.float64)
        variance = values.var(correction=0)
        if not bool(torch.isfinite(variance)):
            raise NonFiniteError("a return is not finite; the scale of values is left as it was")
        was_warm = self.count >= self.warm_up
        self.count = self.count + values.numel()
        kept = self.momentum * self.variance + (1.0 - self.momentum) * variance
        # Returns that do not vary at all say nothing about a scale.
        first = torch.where(variance > _LEAST_STD**2, variance, self.variance)
        is_warm = self.count >= self.warm_up
        self.variance = torch.where(
            was_warm, kept, torch.where(is_warm, first, torch.ones_like(first))
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {"count": self.count.clone(), "variance": self.variance.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these statistics."""
        self.count = state["count"].to(self.count).clone()
        self.variance = state["variance"].to(self.variance).clone()
