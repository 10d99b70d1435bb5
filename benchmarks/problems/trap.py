"""Trap: one blueprint in one slot in one window of time pays, and everything else costs.

A policy that tries things at random loses by it, so the first thing there is to learn is to do
nothing; whoever learns that too well never finds what pays.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from benchmarks.problems.base import Layout, Problem
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.utils.randomness import generator

LIFE = LifecycleConfig(
    gates=GateConfig(min_training_epochs=2),
    auto_training=True,
    auto_blending=True,
    auto_holding=True,
)
"""A short TRAINING, and seeds that advance by themselves: all they need is to be let live."""


class TrapProblem(Problem):
    """The one right seed is worth 1, any other is worth `loss`.

    Args:
        rows: see `Problem`.
        seed: what the right blueprint, slot and window are drawn from.
        window: steps during which the right seed can be germinated.
        loss: worth of every other seed.
        layout: see `Problem`.
    """

    name = "trap"
    layout: ClassVar[Layout] = {**Problem.layout, "lifecycle": LIFE, "fee": 0.05}

    def __init__(
        self,
        rows: int = 64,
        *,
        seed: int = 0,
        window: int = 5,
        loss: float = -0.5,
        **layout: Unpack[Layout],
    ) -> None:
        """Draw what pays."""
        super().__init__(rows, seed=seed, **layout)
        draws = generator(seed, "trap prices")

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=draws))

        self.right_blueprint = self.blueprints[draw(0, len(self.blueprints))]
        self.right_slot = draw(0, self.num_slots)
        self.first_step = draw(0, max(self.steps // 2 - window, 1))
        self.window, self.loss = window, loss

    def price(self, blueprint: Tensor, slot: Tensor, step: Tensor, scaffolded: Tensor) -> Tensor:
        """Return 1 for the right seed, the loss for others."""
        in_time = (step >= self.first_step) & (step < self.first_step + self.window)
        right = (blueprint == self.right_blueprint) & (slot == self.right_slot) & in_time
        return self.loss + (1.0 - self.loss) * right.to(torch.float64)
