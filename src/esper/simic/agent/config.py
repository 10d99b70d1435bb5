"""Every constant of the learner, in one frozen configuration."""

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

# ---- Running scales: one for the rewards of every task, one for the returns the critic learns


REWARD_CLIP = 10.0
"""Largest reward of one step in units of a typical return, but for the change of a potential."""

PRIOR_EPISODES = 4
"""Episodes that all tasks together count for in the unit of one."""

WARM_UP = 32
MOMENTUM = 0.99  # Share of the old variance of returns that an update keeps.
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
        device: where the statistics are kept.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start with a scale of 1."""
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
        kept = MOMENTUM * self.variance + (1.0 - MOMENTUM) * variance
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


RatioKind = Literal["per_head", "joint"]
"""What is clipped: the ratio of every head by itself, or their product."""

HeadWeights = Literal["share", "equal"]
"""What a head's loss counts: as much as the steps it decided, or as much as any other head's."""


@dataclass(frozen=True, kw_only=True)
class PerHead(Config):
    """One number for every head."""

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
        """Return the numbers in the order of `HEAD_NAMES`."""
        return tuple(float(getattr(self, head)) for head in HEAD_NAMES)


OpReference = Literal["prior", "uniform"]
"""What the curious op stays close to: its distribution at the start, or all legal ops alike."""


@dataclass(frozen=True, kw_only=True)
class ExplorationConfig(Config):
    """What keeps the policy curious until its episodes pay off (`RoundOutcome.paid_off`)."""

    op_curiosity: float = option(
        1.0,
        "Weight of the op's closeness to its reference on free steps; until episodes of "
        "the row's task pay off.",
        minimum=0,
    )
    op_reference: OpReference = option(
        "prior",
        "prior: curious as the policy was at the start, so that seeds survive to be judged; "
        "uniform: all legal ops alike.",
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
        "Acting episodes of a task, in rounds that did worse than waiting, after which waiting "
        "counts as right there and its curiosity ends too.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Config):
    """How the best episodes so far are learned from again."""

    weight: float = option(
        0.5,
        "Weight of imitating the best episodes, until enough pay off. With 0 none are kept.",
        minimum=0,
    )


VALUE = "value"
TRUNK = "trunk"
GROUP_NAMES: tuple[str, ...] = (*HEAD_NAMES, VALUE, TRUNK)
"""Groups of the policy's parameters: the eight heads, the critic, and what they all read."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(Config):
    """How a round of episodes becomes a better policy."""

    gamma: float = option(DEFAULT_GAMMA, "Discount of one decision.", minimum=0, maximum=1)
    gae_lambda: float = option(
        0.98, "0 trusts the critic after one step, 1 the rewards to the end.", minimum=0, maximum=1
    )
    learning_rate: float = option(3e-4, "Step size of Adam at the start.", above=0)
    learning_rate_end: float = option(
        1.0, "Share of it that is left at the end; it moves linearly.", above=0, maximum=1
    )
    weight_decay: float = option(0.0, "Decay of the critic's weights alone.", minimum=0)
    lr_multipliers: PerHead = option(
        PerHead.same(1.0), "Factor of the step size of every head's own layers."
    )
    clip: float = option(0.2, "A ratio pays up to 1 plus this, and down to 1 minus.", above=0)
    ratio: RatioKind = option(
        "per_head",
        "per_head: every head is clipped by its own ratio; "
        "joint: the product over the heads that mattered.",
    )
    head_weights: HeadWeights = option(
        "share",
        "share: losses of a head count by its share of the steps, so that the noise of a rare head "
        "does not drown the layers all share; equal: every head counts alike, as in the documents.",
    )
    epochs: int = option(4, "Passes over a round's decisions.", minimum=1)
    minibatches: int = option(1, "Groups of whole rows that a pass steps on in turn.", minimum=1)
    target_kl: float = option(
        0.015, "An update stops when its KL exceeds 1.5 times this; 0 never stops.", minimum=0
    )
    use_bf16: bool = option(
        False,
        "Whether an update scores a round in BF16, as the documents suggest; its log-probabilities "
        "then carry two to three digits, and small ratios drown.",
    )
    max_grad_norm: float = option(5.0, "Longest gradient; longer ones are shortened.", above=0)
    advantage_std_floor: float = option(
        STD_FLOOR, "Least deviation that advantages are divided by.", above=0
    )
    value_coef: float = option(1.0, "Weight of the value loss.", minimum=0)
    value_clip: float = option(
        0.0, "Most a value may move in one update, in the critic's scale; 0 is off.", minimum=0
    )
    skip_forced: bool = option(
        False,
        "Leave steps without a choice out of every loss, and look from decision to decision: "
        "advantages are then discounted by gamma to the power of the steps in between.",
    )
    entropy_coef: float = option(
        0.05, "Weight of the entropy of all heads at the start of training.", minimum=0
    )
    entropy_coef_end: float = option(0.01, "The same at its end; it moves linearly.", minimum=0)
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
        "How much more a head's entropy counts in the bonus while its mean is below its floor, as "
        "a share of its weight; 0 is off (it is no pull where a head is certain: its gradient is 0 "
        "there).",
        minimum=0,
    )
    exploration_kl: float = option(
        0.01, "Weight of KL(uniform, policy) on free steps: the pull out of a collapse.", minimum=0
    )
    exploration: ExplorationConfig = option(ExplorationConfig, "Curiosity, until episodes pay off.")
    anchor_kl: float = option(
        0.0,
        "Weight of KL(policy, the policy it started from): how far training may lead away from "
        "it. It needs a start.",
        minimum=0,
    )
    imitation: ImitationConfig = option(ImitationConfig, "Learning again from rare good episodes.")

    def learning_rate_at(self, progress: float) -> float:
        """Return the step size after this share of the training."""
        share = min(max(progress, 0.0), 1.0)
        return self.learning_rate * (1.0 - share * (1.0 - self.learning_rate_end))
