"""Settings of the learner, and the running scales of rewards and returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.config import Config, option
from esper.leyline.controller import (
    DEFAULT_GAMMA,
    ENTROPY_COEF_PER_HEAD,
    ENTROPY_FLOOR_PENALTY_COEF,
    ENTROPY_FLOOR_PER_HEAD,
)
from esper.leyline.errors import NonFiniteError
from esper.simic.agent.rollout_buffer import STD_FLOOR

# ---- Running scales: one of the rewards of every task, one of the critic's returns


REWARD_CLIP = 10.0
"""Largest reward of one step, in units of a typical return; changes of a potential are exempt."""

PRIOR_EPISODES = 4
"""Weight, in episodes, of the common unit of all tasks in the unit of one task."""

WARM_UP = 32
MOMENTUM = 0.99  # Share of the old variance of returns that an update keeps.
_LEAST_STD = 1e-4


class RewardScales:
    """Divisors of rewards by task: the root mean square of the task's returns so far.

    A point of accuracy is much on one task and little on another. In units of a task's typical
    return, no task dominates the loss or the critic. A task with few episodes borrows from the
    others.

    The units are updated after whole rounds. A running deviation over steps would not work: the
    first steps pay only rent, so the first real reward would look hundreds of times too large.
    """

    def __init__(self) -> None:
        """Start without any return."""
        self._known: dict[str, tuple[int, float]] = {}
        """Number of episodes of every task, and the sum of their squared returns."""

    @property
    def is_known(self) -> bool:
        """Whether any return other than 0 was seen."""
        return any(self._size(name)[0] for name in self._known)

    @property
    def common(self) -> float:
        """The unit of an unknown task; 1 while all returns are 0."""
        sizes = [self._size(name) for name in self._known]
        episodes = sum(count for count, _ in sizes)
        return math.exp(sum(count * size for count, size in sizes) / episodes) if episodes else 1.0

    def units(self, tasks: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
        """Return float32 [R]: the divisors of rewards of rows with these tasks."""
        common = math.log(self.common)
        found = {}
        for name in set(tasks):
            count, size = self._size(name)
            mean = (count * size + PRIOR_EPISODES * common) / (count + PRIOR_EPISODES)
            found[name] = math.exp(mean)
        return torch.tensor([found[name] for name in tasks], device=device)

    def update(self, tasks: Sequence[str], returns: Tensor) -> None:
        """Add the raw returns [R] of a round; those that are not finite are ignored."""
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
        """Return the number of episodes of a task, and the logarithm of their RMS return."""
        count, squares = self._known.get(name, (0, 0.0))
        size = math.sqrt(squares / count) if count else 0.0
        # If all rows of a task have only waited, the size of its returns is unknown.
        return (0, 0.0) if size < _LEAST_STD else (count, math.log(size))


def clip_rewards(rewards: Tensor, shaping: Tensor) -> Tensor:
    """Return rewards [...], clipped except for the change of a potential.

    A potential that falls and rises again pays 0 in total. If only the fall were clipped, it would
    pay something, so its changes are exempt. Infinite rewards stay infinite, to be reported.

    Args:
        rewards: in units of a typical return.
        shaping: the part of them that is the change of a potential; 0 without one.
    """
    own = rewards - shaping
    return torch.where(own.isinf(), own, own.clamp(-REWARD_CLIP, REWARD_CLIP)) + shaping


class ValueNormalizer:
    """The running standard deviation of returns, by which the critic's targets are divided.

    The first `WARM_UP` returns set it; after that it is an exponential moving average.

    Args:
        device: device of the statistics.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start with a scale of 1."""
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.variance = torch.ones((), dtype=torch.float64, device=device)

    @property
    def scale(self) -> Tensor:
        """float32, the divisor of returns."""
        return self.variance.sqrt().clamp(min=_LEAST_STD).to(torch.float32)

    def update(self, returns: Tensor) -> None:
        """Add the returns [N] of a round.

        Raises:
            NonFiniteError: A return is NaN or infinite; the scale stays unchanged.
        """
        if not returns.numel():
            return
        values = returns.detach().to(torch.float64)
        variance = values.var(correction=0)
        if not bool(torch.isfinite(variance)):
            raise NonFiniteError("a return is not finite; the value scale stays unchanged")
        was_warm = self.count >= WARM_UP
        self.count = self.count + values.numel()
        kept = MOMENTUM * self.variance + (1.0 - MOMENTUM) * variance
        # Constant returns have no scale.
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


RatioKind = Literal["per_head", "joint"]
"""Which ratio is clipped: that of every head, or their product."""

HeadWeights = Literal["share", "equal"]
"""Weight of a head's loss: its share of the steps, or the same for all heads."""


@dataclass(frozen=True, kw_only=True)
class PerHead(Config):
    """One number per head."""

    slot: float = option(help="Of the slot.", minimum=0)
    blueprint: float = option(help="Of the blueprint.", minimum=0)
    style: float = option(help="Of the style.", minimum=0)
    tempo: float = option(help="Of the tempo.", minimum=0)
    alpha_target: float = option(help="Of the alpha target.", minimum=0)
    alpha_speed: float = option(help="Of the alpha speed.", minimum=0)
    alpha_curve: float = option(help="Of the alpha curve.", minimum=0)
    op: float = option(help="Of the op.", minimum=0)

    @classmethod
    def same(cls, value: float) -> PerHead:
        """Return the same number for all heads."""
        return cls(**dict.fromkeys(HEAD_NAMES, value))

    def by_head(self) -> tuple[float, ...]:
        """Return the numbers, in the order of `HEAD_NAMES`."""
        return tuple(float(getattr(self, head)) for head in HEAD_NAMES)


OpReference = Literal["prior", "uniform"]
"""Distribution that the op stays close to while it explores: the initial one, or uniform."""


@dataclass(frozen=True, kw_only=True)
class ExplorationConfig(Config):
    """Exploration until episodes pay off (`RoundOutcome.paid_off`)."""

    op_curiosity: float = option(
        1.0,
        "Weight of the op's closeness to its reference on free steps, until episodes of the row's "
        "task pay off.",
        minimum=0,
    )
    op_reference: OpReference = option(
        "prior",
        "prior: the op stays close to the initial policy, under which seeds live long enough to be "
        "judged; uniform: close to all legal ops alike.",
    )
    sparse_entropy: float = option(
        0.03, "Weight of every other head's entropy on free steps that could use it.", minimum=0
    )
    sparse_curiosity: float = option(
        1.0,
        "Weight of KL(uniform, policy) of every other head there, until some episodes pay off.",
        minimum=0,
    )
    patience: int = option(
        16384,
        "Episodes of a task that acted, in rounds that did worse than waiting, after which waiting "
        "counts as right and exploration of that task ends.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Config):
    """Imitation of the best episodes so far."""

    weight: float = option(
        0.5,
        "Weight of imitating the best episodes, until enough pay off. With 0 none are kept.",
        minimum=0,
    )


VALUE = "value"
TRUNK = "trunk"
GROUP_NAMES: tuple[str, ...] = (*HEAD_NAMES, VALUE, TRUNK)
"""Parameter groups of the policy: the eight heads, the critic, and the shared trunk."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(Config):
    """Settings of the PPO update."""

    gamma: float = option(DEFAULT_GAMMA, "Discount per decision.", minimum=0, maximum=1)
    gae_lambda: float = option(
        0.98, "Lambda of GAE: 0 is one step with the critic, 1 Monte Carlo.", minimum=0, maximum=1
    )
    learning_rate: float = option(3e-4, "Learning rate of Adam at the start.", above=0)
    learning_rate_end: float = option(
        1.0, "Share of it at the end; the rate changes linearly.", above=0, maximum=1
    )
    weight_decay: float = option(0.0, "Weight decay of the critic alone.", minimum=0)
    lr_multipliers: PerHead = option(
        PerHead.same(1.0), "Factor of the learning rate of every head's own layers."
    )
    clip: float = option(0.2, "Ratios are clipped to 1 minus this and 1 plus this.", above=0)
    ratio: RatioKind = option(
        "per_head",
        "per_head: clip the ratio of every head; joint: clip the product over the heads that were "
        "used.",
    )
    head_weights: HeadWeights = option(
        "share",
        "share: weight the loss of a head by its share of the steps, so that the noise of a rare "
        "head does not dominate the shared layers; equal: all heads alike, as in the documents.",
    )
    epochs: int = option(4, "Passes over a round's decisions.", minimum=1)
    minibatches: int = option(1, "Minibatches of a pass, each of whole rows.", minimum=1)
    target_kl: float = option(
        0.015, "An update stops when its KL exceeds 1.5 times this; 0 never stops.", minimum=0
    )
    use_bf16: bool = option(
        False,
        "Score a round in BF16 during updates, as the documents suggest; log-probabilities then "
        "have two to three digits, too few for small ratios.",
    )
    max_grad_norm: float = option(5.0, "Gradients are clipped to this norm.", above=0)
    advantage_std_floor: float = option(
        STD_FLOOR, "Least standard deviation that advantages are divided by.", above=0
    )
    value_coef: float = option(1.0, "Weight of the value loss.", minimum=0)
    value_clip: float = option(
        0.0, "Largest change of a value in one update, in the critic's scale; 0 is off.", minimum=0
    )
    skip_forced: bool = option(
        False,
        "Leave steps without a choice out of every loss, and compute advantages from decision to "
        "decision, discounted by gamma to the power of the steps in between.",
    )
    entropy_coef: float = option(
        0.05, "Weight of the entropy of all heads at the start of training.", minimum=0
    )
    entropy_coef_end: float = option(0.01, "The same at the end; it changes linearly.", minimum=0)
    entropy_multipliers: PerHead = option(
        PerHead(**ENTROPY_COEF_PER_HEAD), "Factor of every head's entropy in that bonus."
    )
    entropy_floor: PerHead = option(
        PerHead(**ENTROPY_FLOOR_PER_HEAD), "Normalised entropy below which a head is penalised."
    )
    entropy_floor_penalty: PerHead = option(
        PerHead(**ENTROPY_FLOOR_PENALTY_COEF), "Weight of that penalty."
    )
    collapse_boost: float = option(
        0.0,
        "Extra weight of a head's entropy while its mean is below its floor, as a share of its "
        "weight; 0 is off. It has no effect on a head that is certain, whose gradient is 0.",
        minimum=0,
    )
    exploration_kl: float = option(
        0.01, "Weight of KL(uniform, policy) on free steps; it undoes a collapse.", minimum=0
    )
    exploration: ExplorationConfig = option(
        ExplorationConfig, "Exploration until episodes pay off."
    )
    anchor_kl: float = option(
        0.0,
        "Weight of KL(policy, start), which keeps the policy near the one given by start=FOLDER.",
        minimum=0,
    )
    imitation: ImitationConfig = option(ImitationConfig, "Imitation of the best episodes.")

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate after this share of the training."""
        share = min(max(progress, 0.0), 1.0)
        return self.learning_rate * (1.0 - share * (1.0 - self.learning_rate_end))
