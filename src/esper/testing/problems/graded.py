"""Graded: blueprint, slot and time of germination each have a price, and a seed must survive.

The worth of a seed is the product of the three prices. The best blueprint, the best slot and the
best time are drawn from the problem's seed; the other prices fall off from there in even steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.kasmina.gates import GateConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.randomness import generator
from esper.testing.problems.base import BLUEPRINTS, Problem

LIFE = LifecycleConfig(gates=GateConfig(min_training_epochs=2))
"""The real lifecycle with a short TRAINING, so that a seed can be fossilized within 30 steps."""

_LEAST_PRICE = 0.2
_TIME_SLOPE = 0.05
"""What the price loses for every step away from the best one."""


class GradedProblem(Problem):
    """A seed is worth the product of the prices of its blueprint, its slot and its time."""

    name = "graded"

    def __init__(
        self,
        rows: int = 64,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        steps: int = 30,
        lifecycle: LifecycleConfig = LIFE,
        slots: int = 3,
        blueprints: Sequence[int] = BLUEPRINTS,
        fee: float = 0.0,
    ) -> None:
        """Draw the prices; see `Problem` for the arguments."""
        super().__init__(
            rows,
            seed=seed,
            device=device,
            steps=steps,
            lifecycle=lifecycle,
            slots=slots,
            blueprints=blueprints,
            fee=fee,
        )
        draws = generator(seed, "graded prices")
        of_blueprint = torch.zeros(max(self.blueprints) + 1, dtype=torch.float64)
        of_blueprint[list(self.blueprints)] = _shuffled(len(self.blueprints), draws)
        self.best_step = int(torch.randint(steps // 6, steps // 2, (), generator=draws))
        away = (torch.arange(steps, dtype=torch.float64) - self.best_step).abs()
        self._of_blueprint = of_blueprint.to(self.device)
        self._of_slot = _shuffled(slots, draws).to(self.device)
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
