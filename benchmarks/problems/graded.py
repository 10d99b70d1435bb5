"""Graded: blueprint, slot and time of germination each have a price, and a seed must survive.

The worth of a seed is the product of the three prices. The best blueprint, the best slot and the
best time are drawn from the problem's seed; the other prices fall off from there in even steps.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from benchmarks.problems.base import Layout, Problem
from esper.utils.randomness import generator

_LEAST_PRICE = 0.2
_TIME_SLOPE = 0.05
"""What the price loses for every step away from the best one."""


class GradedProblem(Problem):
    """A seed is worth the product of the prices of its blueprint, its slot and its time."""

    name = "graded"

    def __init__(self, rows: int = 64, *, seed: int = 0, **layout: Unpack[Layout]) -> None:
        """Draw the prices; see `Problem` for the arguments."""
        super().__init__(rows, seed=seed, **layout)
        draws = generator(seed, "graded prices")
        of_blueprint = torch.zeros(max(self.blueprints) + 1, dtype=torch.float64)
        of_blueprint[list(self.blueprints)] = _shuffled(len(self.blueprints), draws)
        self.best_step = int(torch.randint(self.steps // 6, self.steps // 2, (), generator=draws))
        away = (torch.arange(self.steps, dtype=torch.float64) - self.best_step).abs()
        self._of_blueprint = of_blueprint.to(self.device)
        self._of_slot = _shuffled(self.num_slots, draws).to(self.device)
        self._of_step = (1 - _TIME_SLOPE * away).clamp(min=_LEAST_PRICE).to(self.device)

    def price(self, blueprint: Tensor, slot: Tensor, step: Tensor, scaffolded: Tensor) -> Tensor:
        """Return the product of the three prices."""
        known = blueprint.clamp(0, len(self._of_blueprint) - 1)
        return (
            self._of_blueprint[known]
            * self._of_slot[slot]
            * self._of_step[step.clamp(0, self.steps - 1)]
        )


def _shuffled(count: int, draws: torch.Generator) -> Tensor:
    """Return `count` prices in even steps up to 1, float64, in random order."""
    prices = torch.linspace(_LEAST_PRICE, 1.0, count + 1, dtype=torch.float64)[1:]
    return prices[torch.randperm(count, generator=draws)]
