"""Running scales: one for rewards as they come in, one for the returns the critic learns.

Neither subtracts a mean: a mean would pay rows for staying alive, and move the zero that
"better than waiting" is measured from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import NonFiniteError, UsageError

REWARD_CLIP = 10.0
WARM_UP = 32
MOMENTUM = 0.99
_LEAST_STD = 1e-4


class RewardNormalizer:
    """Divides rewards by their running deviation over all steps so far (Welford).

    Before two rewards are known, and while they do not vary, the deviation counts as 1.

    Args:
        clip: normalised rewards are clipped to plus and minus this.
        device: where the statistics are kept.
    """

    def __init__(self, clip: float = REWARD_CLIP, device: torch.device | str = "cpu") -> None:
        """Start without any reward seen."""
        if not clip > 0:
            raise UsageError(f"clip must be above 0, got {clip}")
        self.clip = clip
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self.squares = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def std(self) -> Tensor:
        """float64, what rewards are divided by."""
        std = (self.squares / self.count.clamp(min=1)).sqrt()
        return torch.where((self.count < 2) | (std < _LEAST_STD), 1.0, std)

    def update(self, rewards: Tensor, active: Tensor | None = None) -> None:
        """Learn from the rewards [...] of one step; rows that are not active are left out."""
        active = torch.ones_like(rewards, dtype=torch.bool) if active is None else active
        values = torch.where(active, rewards, 0.0).to(torch.float64)
        count = active.sum().to(torch.float64)
        mean = values.sum() / count.clamp(min=1)
        squares = torch.where(active, values - mean, 0.0).square().sum()
        total = self.count + count
        # Chan's way to join two sets; a step without active rows changes nothing.
        shift = mean - self.mean
        share = count / total.clamp(min=1)
        self.mean = torch.where(count > 0, self.mean + shift * share, self.mean)
        joined = self.squares + squares + shift.square() * self.count * share
        self.squares = torch.where(count > 0, joined, self.squares)
        self.count = total

    def normalize(self, rewards: Tensor) -> Tensor:
        """Return rewards over their deviation, clipped; nothing is learned."""
        return (rewards / self.std.to(rewards.dtype)).clamp(-self.clip, self.clip)

    def __call__(
        self, rewards: Tensor, active: Tensor | None = None, *, frozen: Tensor | None = None
    ) -> Tensor:
        """Learn from the rewards [R] of one step, then return them normalised.

        Args:
            rewards: float32 [R].
            active: bool [R], rows whose episode still runs; others get exactly 0.
            frozen: bool [R], rows whose reward is normalised but not learned from, as the penalty
                of a rollback.
        """
        active = torch.ones_like(rewards, dtype=torch.bool) if active is None else active
        self.update(rewards, active if frozen is None else active & ~frozen)
        return torch.where(active, self.normalize(rewards), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {name: getattr(self, name).clone() for name in ("count", "mean", "squares")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these statistics."""
        for name in ("count", "mean", "squares"):
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
