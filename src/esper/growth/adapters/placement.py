"""Where the ranks of adapters go: components of measured gradients, and a budget to spend on them.

A component of a weight is a direction of its inputs, a row of `A`, with a column of `B` that starts
at 0. Its first gradient is that of the weight seen through this direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.utils.randomness import drawing

EXACT = 512
"""Sides up to which singular vectors are computed exactly; larger ones by random projections."""
OVERSAMPLED = 8
"""Random projections beyond the components that are wanted."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig(Config):
    """How adapters are measured, placed and moved."""

    measure_steps: int = option(
        4, "Optimizer steps on which gradients are measured before ranks are placed.", minimum=1
    )
    moves: tuple[float, ...] = option(
        (0.1, 0.25, 0.45), "Shares of the run at which idle components move; empty is never."
    )
    share: float = option(0.25, "Most of the budget that a move returns.", above=0.0, maximum=1.0)
    idle: float = option(
        0.25, "A component is idle whose use is below this share of the mean.", minimum=0.0
    )
    scale: float = option(1.0, "Factor of B A, what PEFT calls lora_alpha / r.", above=0.0)
    size: float = option(
        0.577, "Length of a new row of A; 0.577 is that of LoRA's random rows.", above=0.0
    )
    power: float = option(
        1.0,
        "Exponent of a component's expected gain: 0 spreads ranks evenly, 1 follows gradients.",
        minimum=0.0,
    )
    most: float = option(
        4.0,
        "Most rank of a weight, as a multiple of the rank that is the same everywhere.",
        above=0.0,
    )

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        if any(not 0.0 < share < 1.0 for share in self.moves):
            raise ConfigError(
                f"AdaptConfig.moves has {self.moves}; name shares of the run between 0 and 1, as "
                "in (0.1, 0.25, 0.45)"
            )


@dataclass(slots=True)
class Components:
    """Directions that a weight could be adapted in, by falling gain."""

    rows: Tensor
    """Directions of inputs, of length 1, one a row."""
    gains: list[float]
    """By how much a first step of Adam on each would lower the loss, for a rate of 1."""


def components_of(
    gradient: Tensor, count: int, name: str, beside: Tensor | None = None
) -> Components:
    """Return the leading right singular directions of a gradient, at most so many.

    Args:
        gradient: of a weight, as a matrix of outputs by inputs.
        count: most directions wanted.
        name: of the weight; random projections are drawn by it.
        beside: rows of `A` that are there already; new directions are orthogonal to them.
    """
    matrix = gradient.detach().float() if gradient.dtype != torch.float64 else gradient.detach()
    if beside is not None and len(beside):
        basis = torch.linalg.qr(beside.detach().to(matrix.dtype).T).Q
        matrix = matrix - (matrix @ basis) @ basis.T
    count = min(count, *matrix.shape)
    if count < 1 or not torch.isfinite(matrix).all():
        return Components(matrix[:0], [])
    if min(matrix.shape) <= EXACT:
        _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
        rows = rows[:count]
    else:
        with drawing(matrix.device, f"adapters/{name}"):
            _, values, columns = torch.svd_lowrank(matrix, min(count + OVERSAMPLED, *matrix.shape))
        rows = columns.T[:count]
    is_there = values[:count] > 1e-7 * values[0].clamp_min(1e-30)
    rows = rows[is_there]
    # Adam moves every entry of B by the rate, against the sign of its gradient.
    gains = (matrix @ rows.T).abs().sum(0)
    order = gains.argsort(descending=True)
    return Components(rows[order], gains[order].tolist())


@dataclass(frozen=True, slots=True)
class Offer:
    """What a weight offers to the budget."""

    gains: list[float]
    """Expected gain of each further component, falling."""
    cost: int
    """Parameters of one component."""


def allocate(offers: Mapping[str, Offer], budget: int, power: float = 1.0) -> dict[str, int]:
    """Return how many components of each weight to open: greedily, by gain per parameter.

    The parameters of all of them together are within the budget.
    """
    listed = [
        (gain**power / offer.cost, name, offer.cost)
        for name, offer in offers.items()
        for gain in offer.gains
        if gain > 0.0
    ]
    ranks = dict.fromkeys(offers, 0)
    for _, name, cost in sorted(listed, key=lambda one: -one[0]):
        if cost <= budget:
            ranks[name] += 1
            budget -= cost
    return ranks


def shares(gains: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the share of each weight in the sum over all."""
    sums = {name: sum(own) for name, own in gains.items()}
    whole = sum(sums.values())
    return {name: value / whole if whole else 0.0 for name, value in sums.items()}
