"""Chooses where the ranks of adapters go, from measured gradients and a budget.

A component of a weight is a row of `A` and a column of `B`, one of which starts at 0. Its first
gradient is the weight's gradient projected on the direction of the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.growth.adapters.weights import AdaptedWeight
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.utils.randomness import drawing, generator

EXACT = 512
"""Smaller side up to which singular vectors are exact; above, random projections find them."""
THIN = 0.5
"""A matrix trains alone only if it can use this share of its part of an even budget."""
SPARE = 0.1
"""Weights may exceed their limit if more than this share of the budget would be left."""
OVERSAMPLED = 8
"""Number of random projections beyond the wanted components."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig(Config):
    """How adapters are measured, placed and moved."""

    measure_steps: int = option(
        4, "Optimizer steps on which gradients are measured before ranks are placed.", minimum=1
    )
    moves: tuple[float, ...] = option(
        (0.25, 0.5), "Shares of the run at which ranks may move; empty is never."
    )
    stay: float = option(
        1.0,
        "Replace the components of a weight if new ones promise at least this many times as much.",
        minimum=0.0,
    )
    idle: float = option(
        0.01,
        "Drop a component that stops training if its use is below this share of the mean.",
        minimum=0.0,
    )
    coverage: float = option(
        0.2,
        "Train only the smaller matrix of a pair where an even budget gives it at least this share "
        "of its largest rank; elsewhere both.",
        minimum=0.0,
    )
    most: float = option(
        2.0,
        "Most rank of a weight, as a multiple of what its share of the budget buys.",
        minimum=1.0,
    )
    scale: float = option(1.0, "Factor of B A, what PEFT calls lora_alpha / r.", above=0.0)
    size: float = option(
        1.5, "Length of random rows of A, where both matrices train; LoRA has 0.58.", above=0.0
    )
    fixed_size: float = option(
        0.4, "Length of fixed directions; at 0.4 the best rate is about LoRA's.", above=0.0
    )

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        if any(not 0.0 < share < 1.0 for share in self.moves):
            raise ConfigError(
                f"AdaptConfig.moves has {self.moves}; name shares of the run between 0 and 1, as "
                "in (0.25, 0.5)"
            )


def check_config(config: AdaptConfig | None) -> AdaptConfig:
    """Return the settings, by default the usual ones; refuse what is none."""
    if config is None:
        return AdaptConfig()
    if not isinstance(config, AdaptConfig):
        raise UsageError(
            f"config must be an AdaptConfig, got a {type(config).__name__}; write "
            "config=esper.AdaptConfig(measure_steps=8)"
        )
    return config


@dataclass(slots=True)
class Components:
    """Directions in which a weight could be adapted, best first."""

    directions: Tensor
    """One in each row: of inputs where B starts at 0, of outputs where A does."""
    gains: list[float]
    """How much a first step of Adam on each would lower the loss, at a learning rate of 1."""


def leading(gradient: Tensor, count: int, name: str) -> Tensor:
    """Return at most `count` leading right singular directions of a gradient.

    Args:
        gradient: of a weight, as a matrix; transposed where directions of outputs are wanted.
        count: most directions wanted.
        name: name of the weight, which seeds the random projections.
    """
    if min(gradient.shape) <= EXACT:
        _, values, rows = torch.linalg.svd(gradient, full_matrices=False)
    else:
        with drawing(gradient.device, f"adapters/{name}"):
            wanted = min(count + OVERSAMPLED, *gradient.shape)
            _, values, columns = torch.svd_lowrank(gradient, wanted)
        rows = columns.T
    is_there = values > 1e-7 * values[0].clamp_min(1e-30)
    found: Tensor = rows[is_there][:count]
    return found


def gains_of(gradient: Tensor, directions: Tensor) -> Tensor:
    """Return the gain of each direction, scaled to length 1.

    Adam moves every entry by the learning rate against the sign of its gradient, so the loss falls
    by the sum of absolute gradients.
    """
    unit = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-30)
    gains: Tensor = (gradient @ unit.T.to(gradient)).abs().sum(0)
    return gains


@dataclass(frozen=True, slots=True)
class Offer:
    """What a weight offers to the budget."""

    gains: list[float]
    """Expected gain of each further component, falling."""
    cost: int
    """Parameters of one component."""


def allocate(offers: Mapping[str, Offer], budget: int) -> dict[str, int]:
    """Return how many components each weight gets, greedily by gain per parameter.

    The sum of parameters stays within the budget.
    """
    listed = [
        (-gain / offer.cost, name)
        for name, offer in offers.items()
        for gain in offer.gains
        if gain > 0.0
    ]
    counts = dict.fromkeys(offers, 0)
    for _, name in sorted(listed, key=lambda one: one[0]):
        if offers[name].cost <= budget:
            counts[name] += 1
            budget -= offers[name].cost
    return counts


def shares(gains: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the share of each weight in the sum over all."""
    sums = {name: sum(own) for name, own in gains.items()}
    whole = sum(sums.values())
    return {name: value / whole if whole else 0.0 for name, value in sums.items()}


class Planner:
    """Decides which weights get new components, how many and in which directions.

    Args:
        weights: all that can be adapted.
        budget: most trainable parameters.
        config: how to place.
        seed: of random directions.
    """

    def __init__(
        self, weights: Mapping[str, AdaptedWeight], budget: int, config: AdaptConfig, seed: int
    ) -> None:
        """Choose for every weight whether both of its matrices train or the smaller one."""
        self._weights, self._budget, self._config, self._seed = weights, budget, config, seed
        self._choose_sides()
        self._share = budget / sum(one.rows + one.columns for one in weights.values())

    def _even_rank(self, one: AdaptedWeight) -> float:
        """Return the rank that a weight's share of the budget buys; LoRA's, if both matrices train.

        A weight whose smaller matrix trains alone gets more rank for the same parameters.
        """
        return self._share * (one.rows + one.columns) / one.cost

    def start(self) -> dict[str, Tensor]:
        """Return the components that need no gradient: random rows of pairs that train in full."""
        both = {n: one for n, one in self._weights.items() if len(one.pair.trained) == 2}
        return {
            name: self._random_rows(name, one, int(self._even_rank(one)), 0)
            for name, one in both.items()
        }

    def _choose_sides(self) -> None:
        """Train one matrix of a pair where that covers enough and the budget is still used up."""
        weights = self._weights.values()
        evenly = self._budget / sum(one.most_rank for one in weights)
        both = self._budget / sum(one.rows + one.columns for one in weights)
        single = [
            one
            for one in weights
            if evenly / one.most_rank >= self._config.coverage
            # A thin matrix alone has too few parameters for what the weight would get.
            and one.most_rank**2 >= THIN * both * (one.rows + one.columns)
        ]
        for one in single:
            one.pair.train_only(one.smaller)
        for one in sorted(single, key=lambda one: one.most_rank):
            room = sum(other.most_rank * other.cost for other in self._weights.values())
            if room < self._budget:
                one.pair.train_only("A", "B")

    def plan(
        self, gradients: Mapping[str, Tensor], step: int, *, is_first: bool
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the directions of new components, and the share of the gain, of each weight.

        A weight left out keeps its components. New ones replace all that a weight trains now; where
        both of its matrices train, they come beside them.
        """
        found, left = {}, self._budget
        asked: dict[str, list[float]] = {}
        for name, one in self._weights.items():
            own = one.pair.rank
            if name not in gradients or not torch.isfinite(gradients[name]).all():
                left -= own * one.cost
                continue
            most = min(max(1, round(self._config.most * self._even_rank(one))), one.most_rank)
            new = self._components(name, one, gradients[name], step, most)
            asked[name] = new.gains
            if len(one.pair.trained) == 2:
                left -= own * one.cost
                if is_first:
                    room = len(new.gains) - own
                    found[name] = Components(new.directions[:room], new.gains[:room])
            elif own and not self._moves(one, new, gradients[name]):
                left -= own * one.cost
            else:
                found[name] = new
        offers = {name: Offer(new.gains, self._weights[name].cost) for name, new in found.items()}
        counts = allocate(offers, left)
        chosen = {name: found[name].directions[:count] for name, count in counts.items()}
        left -= sum(offers[name].cost * count for name, count in counts.items())
        if left > SPARE * self._budget:
            chosen |= self._spend_rest(counts, gradients, left, step)
        return chosen, shares(asked)

    def _spend_rest(
        self, counts: Mapping[str, int], gradients: Mapping[str, Tensor], left: int, step: int
    ) -> dict[str, Tensor]:
        """Return the components of weights that exceed their limit to use what is left."""
        found, offers = {}, {}
        for name, count in counts.items():
            one = self._weights[name]
            own = one.pair.rank if len(one.pair.trained) == 2 else 0
            new = self._components(name, one, gradients[name], step, one.most_rank)
            found[name] = new.directions
            offers[name] = Offer(new.gains[count : one.most_rank - own], one.cost)
        more = allocate(offers, left)
        return {name: found[name][: counts[name] + more[name]] for name in more if more[name]}

    def _components(
        self, name: str, one: AdaptedWeight, gradient: Tensor, step: int, most: int
    ) -> Components:
        """Return at most so many directions that a weight could train next, best first."""
        matrix = gradient if one.pair.start == "B" else gradient.T
        if len(one.pair.trained) == 1:
            rows = self._config.fixed_size * leading(matrix, most, name)
        else:
            rows = self._random_rows(name, one, most, step)
        gains = gains_of(matrix, rows)
        order = gains.argsort(descending=True)
        return Components(rows[order], gains[order].tolist())

    def _random_rows(self, name: str, one: AdaptedWeight, count: int, step: int) -> Tensor:
        """Return rows from which both matrices train: they find their own way (research/log.md)."""
        chance = generator("adapters", self._seed, name, step)
        rows = torch.randn(min(count, one.most_rank), one.columns, generator=chance)
        unit = rows / rows.norm(dim=1, keepdim=True)
        found: Tensor = (self._config.size * unit).to(one.pair.A)
        return found

    def _moves(self, one: AdaptedWeight, new: Components, gradient: Tensor) -> bool:
        """Return whether new components promise more than those that a weight trains now."""
        is_right = one.pair.start == "B"
        directions = one.pair.A.detach() if is_right else one.pair.B.detach().T
        now = float(gains_of(gradient if is_right else gradient.T, directions).sum())
        return sum(new.gains[: one.pair.rank]) >= self._config.stay * now
