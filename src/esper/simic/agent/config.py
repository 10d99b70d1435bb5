"""Every constant of the learner, in one frozen configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.config import Config, option
from esper.leyline.defaults import (
    DEFAULT_GAMMA,
    ENTROPY_COEF_PER_HEAD,
    ENTROPY_FLOOR_PENALTY_COEF,
    ENTROPY_FLOOR_PER_HEAD,
)
from esper.simic.agent.advantages import STD_FLOOR
from esper.simic.agent.normalizers import MOMENTUM

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
    """What keeps the policy curious until its episodes pay off."""

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
    sparse_paid_off_target: float = option(
        0.1,
        "Share of episodes that pay off at which that has ended; they settle before the op does.",
        above=0,
        maximum=1,
    )
    paid_off_return: float = option(
        0.0,
        "An episode pays off whose raw return exceeds this and whose network scored above its "
        "twin, where it has one; a return of 0 is what waiting brings.",
    )
    paid_off_target: float = option(
        0.5,
        "Share of episodes that pay off at which curiosity and imitation have ended.",
        above=0,
        maximum=1,
    )
    paid_off_momentum: float = option(
        0.9, "Share of a task's old average that a round keeps.", minimum=0, maximum=1
    )
    patience: int = option(
        16384,
        "Acting episodes of a task, in rounds that did worse than waiting, after which waiting "
        "counts as right there and its curiosity ends too.",
        minimum=1,
    )
    skilled_patience: int = option(
        128,
        "The same where the policy succeeds on other tasks: it could, were it worth it.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Config):
    """How the best episodes so far are learned from again."""

    weight: float = option(
        0.5,
        "Weight of imitating them, until episodes pay off. With 0 none are kept.",
        minimum=0,
    )
    capacity: int = option(16, "Most episodes that are kept.", minimum=1)


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
    adam_eps: float = option(1e-5, "What Adam adds to its denominator.", above=0)
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
    value_momentum: float = option(
        MOMENTUM,
        "Share of the old scale of returns that an update keeps.",
        minimum=0,
        maximum=0.999,
    )
    forced_value_weight: float = option(
        0.2, "Weight of steps without a choice in the value loss.", minimum=0, maximum=1
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
