"""The learning targets of a round, and the total loss of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, TensorRecord
from esper.simic.agent.config import PPOConfig, clip_rewards
from esper.simic.agent.losses import (
    LEAST_SHARE,
    collapsed_heads,
    compute_entropy_floor_penalty,
    compute_ppo_loss,
    curiosity,
    curiosity_weights,
    entropy_weights,
    exploration_coefficients,
    head_shares,
    mean_weights,
    penalty_schedule,
    value_errors,
)
from esper.simic.agent.rollout_buffer import (
    TamiyoRolloutBuffer,
    compute_gae,
    compute_per_head_advantages,
    decision_lambda,
    normalize_advantages,
)
from esper.tamiyo.networks.decision import Scores
from esper.tamiyo.policy.action_masks import causal_heads
from esper.tamiyo.policy.distribution import entropy, exploration_kl, masked_kl

FORCED_VALUE_WEIGHT = 0.2  # Weight of steps without a choice in the value loss.

_TENSORS_WITH_ROWS = (
    *("advantages", "head_advantages", "returns", "value_targets", "old_values", "causal"),
    *("actor_weights", "value_weights", "entropy_weights", "curiosity_weights"),
    *("exploration_weights", "exploration_coefficients", "floor_counts"),
)


@dataclass(frozen=True, slots=True)
class Targets:
    """Learning targets and weights of every step of a round; tensors [R, T] or [R, T, 8]."""

    raw_advantages: Tensor
    """From GAE, in units of the task's typical return, as are returns and errors."""
    advantages: Tensor
    """Normalised over the usable steps; exactly 0 elsewhere."""
    head_advantages: Tensor
    """[R, T, 8], the same where the head was used; exactly 0 elsewhere."""
    advantage_mean: Tensor
    advantage_std: Tensor
    advantage_floored: Tensor
    """Scalars: moments of the raw advantages over the usable steps."""
    returns: Tensor
    baselines: Tensor
    """The critic's value minus the potential."""
    potentials: Tensor
    """Potential of the reward before each step; 0 without one."""
    td_errors: Tensor
    """Reward plus discounted next baseline, minus baseline."""
    value_targets: Tensor
    """Targets of the critic, in its scale: returns plus potentials."""
    old_values: Tensor
    """Q(s, taken op) of the rollout, in the critic's scale."""
    causal: Tensor
    """bool [R, T, 8], heads that were used at a usable step."""
    actor_weights: Tensor
    """[R, T, 8], weight of each step in the loss of every head; [R, T] for joint ratios."""
    value_weights: Tensor
    """[R, T]."""
    entropy_weights: Tensor
    """[R, T, 8]."""
    curiosity_weights: Tensor
    """[R, T], of the op's closeness to its reference."""
    exploration_weights: Tensor
    """[R, T, 8], weights that average a head over the usable steps that could use it."""
    exploration_coefficients: Tensor
    """[R, 8], factors of these means."""
    floor_counts: Tensor
    """bool [R, T, 8], the steps over which a head's entropy is compared with its floor."""
    shares: Tensor
    """[8], weight of every head's entropy terms."""

    @property
    def critic_values(self) -> Tensor:
        """[R, T], the critic's values: the baselines plus the potential."""
        return self.baselines + self.potentials

    @property
    def critic_returns(self) -> Tensor:
        """[R, T], the returns that the critic predicts: the returns plus the potential."""
        return self.returns + self.potentials

    def rows(self, rows: Tensor) -> Targets:
        """Return these rows of all tensors that a minibatch needs."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _TENSORS_WITH_ROWS})

    def rescaled(self, factor: Tensor) -> Targets:
        """Return the targets for a critic whose output is multiplied by this factor."""
        return replace(
            self, value_targets=self.value_targets * factor, old_values=self.old_values * factor
        )

    def nonfinite(self) -> list[str]:
        """Return the names of tensors that hold a NaN or an infinity."""
        names = [
            field.name for field in fields(self) if getattr(self, field.name).is_floating_point()
        ]
        fine = torch.stack([torch.isfinite(getattr(self, name)).all() for name in names]).tolist()
        return [name for name, is_fine in zip(names, fine, strict=True) if not is_fine]


def make_targets(
    buffer: TamiyoRolloutBuffer,
    config: PPOConfig,
    *,
    scale: Tensor,
    progress: float,
    paid_off: Tensor | float,
    units: Tensor | None = None,
    groups: Tensor | None = None,
) -> Targets:
    """Compute the targets of a complete round.

    Where the reward pays the change of a potential, the value of a state is the critic's output
    minus the potential. The potential is measured, with noise that the critic cannot predict, so
    it is subtracted exactly.

    Args:
        buffer: the round.
        config: settings of the learner.
        scale: factor from the critic's output to rewards.
        progress: share of the training that is done.
        paid_off: [R], share of the episodes of a row's task that pay off; or one for all.
        units: [R], divisors of raw rewards and potentials; 1 by default.
        groups: int64 [R], index of the task of every row; one task by default.
    """
    batch = buffer.batch()
    paid_off = torch.as_tensor(paid_off, device=scale.device).to(scale).expand(batch.rows)
    unit = torch.ones_like(scale) if units is None else units.to(scale).unsqueeze(1)
    paid, paid_next = batch.potentials / unit, buffer.next_potentials() / unit
    rewards = clip_rewards(batch.rewards / unit, config.gamma * paid_next - paid)
    baselines = batch.values * scale - paid
    following = buffer.next_values() * scale - paid_next
    advantages, returns = compute_gae(
        rewards,
        baselines,
        following,
        batch.terminated,
        batch.truncated,
        config.gamma,
        decision_lambda(batch.free, config.gae_lambda) if config.skip_forced else config.gae_lambda,
    )
    usable = batch.usable
    taught = usable if config.skip_forced else batch.valid
    normalised, mean, std, floored = normalize_advantages(
        advantages, usable, config.advantage_std_floor, groups
    )
    causal = causal_heads(batch.op) & usable.unsqueeze(-1)
    taken = batch.op_values.gather(-1, batch.op.unsqueeze(-1)).squeeze(-1)
    could_use = usable.unsqueeze(-1) & batch.available
    own = mean_weights(causal)
    shares = torch.ones_like(own[0, 0])
    if config.head_weights == "share":
        decided = head_shares(causal, usable)
        own, shares = own * decided, decided.clamp(min=LEAST_SHARE)
    return Targets(
        raw_advantages=advantages,
        advantages=normalised,
        head_advantages=torch.stack(
            list(compute_per_head_advantages(normalised, batch.op, usable).values()), dim=-1
        ),
        advantage_mean=mean,
        advantage_std=std,
        advantage_floored=floored,
        returns=returns,
        baselines=baselines,
        potentials=paid,
        td_errors=rewards + config.gamma * following - baselines,
        value_targets=(returns + paid) / scale,
        old_values=taken,
        causal=causal,
        actor_weights=(
            mean_weights(usable.unsqueeze(-1)).squeeze(-1) if config.ratio == "joint" else own
        ),
        value_weights=_value_weights(taught, batch.free),
        entropy_weights=entropy_weights(
            config, taught, batch.free, batch.available, progress=progress, shares=shares
        ),
        curiosity_weights=curiosity_weights(config, usable, paid_off=paid_off),
        exploration_weights=mean_weights(could_use),
        exploration_coefficients=exploration_coefficients(config, paid_off=paid_off, shares=shares),
        floor_counts=could_use,
        shares=shares,
    )


def _value_weights(taught: Tensor, free: Tensor) -> Tensor:
    """Return weights that average the value loss, smaller on steps without a choice."""
    weights = taught * torch.where(free, 1.0, FORCED_VALUE_WEIGHT)
    return weights / weights.sum().clamp(min=1e-8)


@dataclass(frozen=True, slots=True)
class Scored(TensorRecord):
    """Scores of some rows by the policy; tensors [r, T, 8], values [r, T]."""

    log_probs: Tensor
    """Of the actions taken; exactly 0 in heads that the op does not use."""
    values: Tensor
    """Q(s, taken op)."""
    entropies: Tensor
    """Over the base masks."""
    own_entropies: Tensor
    """Over the masks that each head was drawn with."""
    exploration: Tensor
    """KL(uniform, policy) over the base masks."""
    curiosity: Tensor
    """[r, T], closeness of the op to its reference."""
    anchored: Tensor
    """KL(policy, the policy it started from) over the base masks; 0 without one."""

    @classmethod
    def of(
        cls,
        scores: Scores,
        base_masks: Tensor,
        reference: Tensor,
        anchor: Tensor | None = None,
    ) -> Scored:
        """Return the inputs of the losses from a scored sequence.

        Args:
            scores: the sequence.
            base_masks: bool [r, T, 8, K].
            reference: of the op, as in `curiosity`.
            anchor: [r, T, 8, K], logits of the policy it started from.
        """
        zero = torch.zeros_like(scores.log_probs)
        return cls(
            log_probs=scores.log_probs,
            values=scores.values,
            entropies=entropy(scores.logits, base_masks),
            own_entropies=scores.entropies.detach(),
            exploration=exploration_kl(scores.logits, base_masks),
            curiosity=curiosity(scores.logits, base_masks, reference),
            anchored=zero if anchor is None else masked_kl(scores.logits, anchor, base_masks),
        )

    @classmethod
    def empty(cls, values: Tensor, heads: int) -> Scored:
        """Return zeros for the scores of all rows, like values [R, T]."""
        by_head = values.unsqueeze(-1).expand(*values.shape, heads)
        by_step = dict.fromkeys(("values", "curiosity"), values)
        shapes = (by_step.get(each.name, by_head) for each in fields(cls))
        return cls(*(torch.zeros_like(shape) for shape in shapes))

    def write(self, rows: Tensor | None, scored: Scored) -> None:
        """Copy the scores of these rows, or of all rows."""
        for field in fields(self):
            place, new = getattr(self, field.name), getattr(scored, field.name).detach()
            if rows is None:
                place.copy_(new)
            else:
                place[rows] = new

    def forget(self) -> None:
        """Fill all tensors with NaN: not measured."""
        for value in self.state_dict().values():
            value.fill_(torch.nan)


@dataclass(frozen=True, slots=True)
class Losses:
    """The parts of the loss; scalars except for the exploration."""

    policy: Tensor
    value: Tensor
    bonus: Tensor
    """Weighted entropies and curiosity; it is subtracted."""
    penalty: Tensor
    """Penalty of heads whose entropy is below its floor."""
    exploration: Tensor
    """Mean KL by head [8], without its coefficients."""
    total: Tensor


class Objective:
    """The loss function of one update.

    Args:
        config: settings of the learner.
        progress: share of the training that is done.
        shares: [8], weight of every head's floor penalty; 1 by default.
    """

    def __init__(self, config: PPOConfig, progress: float, shares: Tensor | None = None) -> None:
        """Compute the coefficients that depend on progress."""
        self._config = config
        self._floors = dict(zip(HEAD_NAMES, config.entropy_floor.by_head(), strict=True))
        penalties = torch.tensor(config.entropy_floor_penalty.by_head())
        penalties = penalties * penalty_schedule(progress)
        penalties = penalties if shares is None else penalties * shares.cpu()
        self._penalties = dict(zip(HEAD_NAMES, penalties.tolist(), strict=True))

    def __call__(
        self, scored: Scored, old_log_probs: Tensor, targets: Targets, share: float = 1.0
    ) -> Losses:
        """Return the parts of the loss on some rows.

        Args:
            scored: their scores by the policy.
            old_log_probs: [r, T, 8], at the weights that the update started from.
            targets: their targets; the weights are those of the whole round.
            share: their share of the round's rows, so that every part has a loss of the same size.
        """
        config = self._config
        policy = self.policy_loss(scored, old_log_probs, targets, share)
        errors = value_errors(
            scored.values, targets.value_targets, targets.old_values, config.value_clip
        )
        value = (errors * targets.value_weights).sum() / share
        bonus = (scored.entropies * self._entropy_weights(scored, targets)).sum()
        bonus = (bonus + (scored.curiosity * targets.curiosity_weights).sum()) / share
        penalty = self.floor_penalty(scored, targets)
        explored = scored.exploration * targets.exploration_weights / share
        pulled = (explored * targets.exploration_coefficients.unsqueeze(1)).sum()
        held = config.anchor_kl * (scored.anchored * targets.exploration_weights).sum() / share
        total = policy + config.value_coef * value - bonus + penalty + pulled + held
        return Losses(policy, value, bonus, penalty, explored.flatten(0, -2).sum(0), total)

    def _entropy_weights(self, scored: Scored, targets: Targets) -> Tensor:
        """Return the weights of entropies in the bonus, larger for collapsed heads."""
        if not self._config.collapse_boost:
            return targets.entropy_weights
        floors = scored.entropies.new_tensor(self._config.entropy_floor.by_head())
        collapsed = collapsed_heads(scored.entropies, targets.floor_counts, floors)
        return targets.entropy_weights * (1 + self._config.collapse_boost * collapsed)

    def policy_loss(
        self,
        scored: Scored,
        old_log_probs: Tensor,
        targets: Targets,
        share: float = 1.0,
        heads: Sequence[str] = HEAD_NAMES,
    ) -> Tensor:
        """Return the clipped surrogate of these heads; with joint ratios that of the action."""
        joint = self._config.ratio == "joint"
        weights = targets.actor_weights / share
        return compute_ppo_loss(
            old_log_probs=_by_head(old_log_probs, heads),
            new_log_probs=_by_head(scored.log_probs, heads),
            advantages=targets.advantages if joint else _by_head(targets.head_advantages, heads),
            clip_epsilon=self._config.clip,
            joint=joint,
            weights=weights if joint else _by_head(weights, heads),
        )

    def floor_penalty(
        self, scored: Scored, targets: Targets, heads: Sequence[str] = HEAD_NAMES
    ) -> Tensor:
        """Return the penalty of these heads for an entropy below its floor."""
        return compute_entropy_floor_penalty(
            _by_head(scored.entropies, heads),
            _by_head(targets.floor_counts, heads),
            {head: self._floors[head] for head in heads},
            self._penalties,
        )


def _by_head(tensor: Tensor, heads: Sequence[str]) -> dict[str, Tensor]:
    """Return some heads of a tensor [..., 8]."""
    return {head: tensor[..., HEAD_NAMES.index(head)] for head in heads}
