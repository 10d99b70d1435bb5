"""Scaffold: seed B pays only if seed A lived long before it and was pruned in between.

A itself is worth nothing good, and once its slot is free again nothing that is observed tells that
it was ever there: the pattern of two generations that the design documents describe.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from benchmarks.problems.base import Layout, Problem
from benchmarks.problems.trap import LIFE
from esper.kasmina.state import SlotState
from esper.utils.randomness import generator

BLUEPRINTS: tuple[int, ...] = (3, 8, 9, 10, 11)
"""The blueprints that fit a slot: the five of a host of vectors."""


class ScaffoldProblem(Problem):
    """B is worth 1 if it is germinated `gap` steps or more after an A was pruned.

    Args:
        rows: see `Problem`.
        seed: what A and B are drawn from.
        gap: least steps from the end of A to the germination of B.
        life: epochs A must have lived.
        loss: worth of every other seed.
        hindsight: credit for A, paid in the step after B is fossilized.
        layout: see `Problem`.
    """

    name = "scaffold"
    layout: ClassVar[Layout] = {
        **Problem.layout,
        "lifecycle": LIFE,
        "steps": 120,
        "blueprints": BLUEPRINTS,
    }

    def __init__(
        self,
        rows: int = 64,
        *,
        seed: int = 0,
        gap: int = 50,
        life: int = 3,
        loss: float = 0.0,
        hindsight: float = 0.0,
        **layout: Unpack[Layout],
    ) -> None:
        """Draw A and B."""
        super().__init__(rows, seed=seed, **layout)
        draws = generator(seed, "scaffold prices")
        first, second = torch.randperm(len(self.blueprints), generator=draws)[:2].tolist()
        self.scaffold: int = self.blueprints[first]
        self.beneficiary: int = self.blueprints[second]
        self.gap, self.scaffold_life = gap, life
        self.loss, self.hindsight = loss, hindsight

    def price(self, blueprint: Tensor, slot: Tensor, step: Tensor, scaffolded: Tensor) -> Tensor:
        """Return 1 for a B that an A prepared, the loss for anything else."""
        prepared = (scaffolded >= 0) & (step - scaffolded >= self.gap)
        right = (blueprint == self.beneficiary) & prepared
        return self.loss + (1.0 - self.loss) * right.to(torch.float64)

    def payoff(self, worth: Tensor) -> Tensor:
        """Return the worth, with the credit for A where it is due."""
        return worth + self.hindsight * (worth > 0).to(worth.dtype)

    def remember(self, before: SlotState, step: Tensor) -> None:
        """Keep the step at which the first A that had lived was pruned."""
        gone = before.has_module & ~self.state.has_module
        was_scaffold = (before.blueprint == self.scaffold) & (before.age >= self.scaffold_life)
        ended = (gone & was_scaffold).any(1) & (self.scaffolded < 0)
        self.scaffolded = torch.where(ended, step, self.scaffolded)

    def pay(self, germinated: Tensor, fossilized: Tensor, own: Tensor) -> Tensor:
        """Return the payments; the credit for A comes a step late, or at once in the last one."""
        paid = super().pay(germinated, fossilized, own)
        earned = self.hindsight * (fossilized & (own > 0)).to(paid.dtype)
        last = self.tracker.epoch == self.steps
        paid[:, 2] = self.pending + torch.where(last, earned, 0.0)
        self.pending = torch.where(last, 0.0, earned)
        return paid
