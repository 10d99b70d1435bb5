"""Running scales: one for the rewards of every task, one for the returns the critic learns.

Neither subtracts a mean: a mean would pay rows for staying alive, and move the zero that
"better than waiting" is measured from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import NonFiniteError, UsageError

REWARD_CLIP = 10.0
"""Largest reward of one step in units of a typical return, but for the change of a potential."""

PRIOR_EPISODES = 4
"""Episodes that all tasks together count for in the unit of one."""

WARM_UP = 32
MOMENTUM = 0.99
_LEAST_STD = 1e-4


class RewardScales:
    """What rewards of every task are divided by: the size of its returns so far.

    A point of accuracy is much on one task and little on another. In units of what returns of a
    task are like (their root mean square), neither the loss nor the critic belongs to the tasks
    that happen to pay most. A task that few episodes are known of leans on the others.

    The units are learned from whole rounds and stay what they are within one. A deviation that
    follows the steps would not do: the first steps pay nothing but rent, and measured by that,
    whatever comes first looks hundreds of times too large.
    """

    def __init__(self) -> None:
        """Start without any return seen."""
        self._known: dict[str, tuple[int, float]] = {}
        """Episodes of every task whose returns were not all 0, and the sum of their squares."""

    @property
    def is_known(self) -> bool:
        """Whether any return but 0 was seen."""
        return any(self._size(name)[0] for name in self._known)

    @property
    def common(self) -> float:
        """The unit of a task that nothing is known of; 1 while all returns are 0."""
        sizes = [self._size(name) for name in self._known]
        episodes = sum(count for count, _ in sizes)
        return math.exp(sum(count * size for count, size in sizes) / episodes) if episodes else 1.0

    def units(self, tasks: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
        """Return float32 [R]: what the rewards of rows with these tasks are divided by."""
        common = math.log(self.common)
        found = {}
        for name in set(tasks):
            count, size = self._size(name)
            mean = (count * size + PRIOR_EPISODES * common) / (count + PRIOR_EPISODES)
            found[name] = math.exp(mean)
        return torch.tensor([found[name] for name in tasks], device=device)

    def update(self, tasks: Sequence[str], returns: Tensor) -> None:
        """Learn from the raw returns [R] of a round; what is not finite teaches nothing."""
        for name, value in zip(tasks, returns.tolist(), strict=True):
            if math.isfinite(value):
                count, squares = self._known.get(name, (0, 0.0))
                self._known[name] = (count + 1, squares + value * value)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {name: list(known) for name, known in self._known.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these statistics."""
        self._known = {name: (int(count), float(sum_)) for name, (count, sum_) in state.items()}

    def _size(self, name: str) -> tuple[int, float]:
        """Return the episodes of a task, and the logarithm of the size of their returns."""
        count, squares = self._known.get(name, (0, 0.0))
        size = math.sqrt(squares / count) if count else 0.0
        # A task whose rows have only waited says nothing of what a return is there.
        return (0, 0.0) if size < _LEAST_STD else (count, math.log(size))


def clip_rewards(rewards: Tensor, shaping: Tensor) -> Tensor:
    """Return rewards [...] with what they pay beyond a potential's change clipped.

    A potential that dips and comes back pays nothing in the end. Were the dip clipped and the way
    back not, it would; so its change is left whole. What is infinite stays so, to be found.

    Args:
        rewards: in units of a typical return.
        shaping: the part of them that is the change of a potential; 0 without one.
    """
    own = rewards - shaping
    return torch.where(own.isinf(), own, own.clamp(-REWARD_CLIP, REWARD_CLIP)) + shaping


class ValueNormalizer:
    """The running deviation of returns: the critic learns returns divided by it.

    The first returns set it as soon as there are enough of them; after that it follows slowly.

    Args:
        momentum: share of the old variance that an update keeps.
        device: where the statistics are kept.
    """

    def __init__(self, momentum: float = MOMENTUM, device: torch.device | str = "cpu") -> None:
        """Start with a scale of 1."""
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum must be 0 or more and below 1, got {momentum}")
        self.momentum = momentum
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
        was_warm = self.count >= WARM_UP
        self.count = self.count + values.numel()
        kept = self.momentum * self.variance + (1.0 - self.momentum) * variance
        # Returns that do not vary at all say nothing about a scale.
        first = torch.where(variance > _LEAST_STD**2, variance, self.variance)
        is_warm = self.count >= WARM_UP
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
