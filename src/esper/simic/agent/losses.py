"""The losses of an update: clipped surrogate over eight heads, critic, exploration, imitation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import UsageError
from esper.simic.agent.config import PPOConfig, RewardScales, clip_rewards
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.policy.distribution import masked_log_softmax

HEAD_LOG_RATIO = 20.0
"""Largest magnitude of a head's log-ratio; beyond it a float32 would overflow."""

JOINT_LOG_RATIO = 30.0
"""Largest magnitude of the joint log-ratio."""


def head_ratios(log_ratios: Tensor) -> Tensor:
    """Return the ratio of every head, [..., heads]."""
    return log_ratios.clamp(-HEAD_LOG_RATIO, HEAD_LOG_RATIO).exp()


def joint_ratio(log_ratios: Tensor) -> Tensor:
    """Return the product over heads, [...]; an unused head has a log-ratio of 0."""
    return log_ratios.sum(-1).clamp(-JOINT_LOG_RATIO, JOINT_LOG_RATIO).exp()


def compute_ppo_loss(
    *,
    old_log_probs: Mapping[str, Tensor],
    new_log_probs: Mapping[str, Tensor],
    advantages: Tensor | Mapping[str, Tensor],
    clip_epsilon: float = 0.2,
    joint: bool = False,
    masks: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, Tensor] | Tensor | None = None,
) -> Tensor:
    """Return the clipped surrogate loss of any heads, a scalar.

    Args:
        old_log_probs: {head: [...]}, of the policy that acted.
        new_log_probs: {head: [...]}, of the policy that learns.
        advantages: [...], or {head: [...]}, as `compute_per_head_advantages` returns them.
        clip_epsilon: ratios are clipped to 1 minus this and 1 plus this.
        joint: clip the product over heads instead of each head's own ratio.
        masks: {head: bool [...]}, steps at which the head was used; all of them by default. A head
            is averaged over its own steps; the joint action over steps that use any head.
        weights: {head: [...]}, or [...] for the joint action: weight of each step in the sum,
            instead of those averages.

    Raises:
        UsageError: The heads of the arguments differ.
    """
    heads = list(old_log_probs)
    by_head = {
        "new_log_probs": new_log_probs,
        "advantages": advantages,
        "masks": masks,
        "weights": weights,
    }
    for name, given in by_head.items():
        if isinstance(given, Mapping) and set(given) != set(heads):
            raise UsageError(
                f"{name} must have the heads of old_log_probs ({', '.join(heads)}), "
                f"got {', '.join(given)}"
            )

    def stack(given: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([given[head] for head in heads], dim=-1)

    log_ratios = stack(new_log_probs) - stack(old_log_probs).detach()
    if masks is not None:
        log_ratios = torch.where(stack(masks).to(torch.bool), log_ratios, 0.0)
    if weights is None:
        counts = torch.ones_like(log_ratios) if masks is None else stack(masks)
        counts = counts.to(torch.bool)
        shares = mean_weights(counts.any(-1, keepdim=True) if joint else counts)
    else:
        shares = stack(weights) if isinstance(weights, Mapping) else weights.unsqueeze(-1)
    ratio = joint_ratio(log_ratios).unsqueeze(-1) if joint else head_ratios(log_ratios)
    paid = stack(advantages) if isinstance(advantages, Mapping) else advantages.unsqueeze(-1)
    gains = paid * shares
    clipped = ratio.clamp(1.0 - clip_epsilon, 1.0 + clip_epsilon)
    losses = -torch.minimum(gains * ratio, gains * clipped)
    return losses.flatten(0, -2).sum(0).sum()


def mean_weights(counts: Tensor) -> Tensor:
    """Return weights [..., heads] that average each head over the steps where `counts` is True."""
    weights = counts.to(torch.float32)
    return weights / weights.flatten(0, -2).sum(0).clamp(min=1.0)


LEAST_SHARE = 0.01
"""Least weight of a head in the terms that keep its entropy up, as a share of the steps."""


def head_shares(causal: Tensor, usable: Tensor) -> Tensor:
    """Return the share of the usable steps [...] at which every head was used, [heads]."""
    decided = causal.flatten(0, -2).sum(0).to(torch.float32)
    return decided / usable.sum().clamp(min=1)


def value_errors(
    values: Tensor, targets: Tensor, old_values: Tensor, value_clip: float = 0.0
) -> Tensor:
    """Return half the squared error of every step, [...].

    With `value_clip` the larger of two errors counts: that of the value, and that of the value
    clipped to this distance from its old one. So moving further gains nothing.
    """
    errors = (values - targets).square()
    if value_clip > 0:
        moved = old_values + (values - old_values).clamp(-value_clip, value_clip)
        errors = torch.maximum(errors, (moved - targets).square())
    return 0.5 * errors


OP = HEAD_NAMES.index("op")
PAID_OFF_TARGET = 0.5  # Share of episodes that pay off at which curiosity and imitation have ended.
SPARSE_PAID_OFF_TARGET = 0.1  # The same for all heads but the op: they settle before it does.


def entropy_coefficient(config: PPOConfig, progress: float) -> float:
    """Return the weight of the entropy bonus after this share of the training."""
    share = min(max(progress, 0.0), 1.0)
    return config.entropy_coef + share * (config.entropy_coef_end - config.entropy_coef)


def penalty_schedule(progress: float) -> float:
    """Return the factor of the floor penalty: 1.5 early, then 1, and down to 0.5 at the end."""
    if progress < 0.25:
        return 1.5
    if progress <= 0.75:
        return 1.0
    return 1.0 - 2.0 * (min(progress, 1.0) - 0.75)


def entropy_weights(
    config: PPOConfig,
    valid: Tensor,
    free: Tensor,
    available: Tensor,
    *,
    progress: float,
    shares: Tensor,
) -> Tensor:
    """Return the weight of every entropy in the bonus, [R, T, 8].

    Every head has its multiplier on every valid step. On free steps that could use it, every head
    but the op has an extra weight; the op has `curiosity` instead. All weights are multiplied by
    the head's share, as its policy loss is.

    Args:
        config: the coefficients.
        valid: bool [R, T].
        free: bool [R, T], more than one op was legal.
        available: bool [R, T, 8], heads that some legal op would use.
        progress: share of the training that is done.
        shares: [8], weight of every head.
    """
    multipliers = torch.tensor(config.entropy_multipliers.by_head(), device=valid.device)
    everywhere = mean_weights(valid.unsqueeze(-1)) * multipliers
    bonus = torch.full((len(HEAD_NAMES),), config.exploration.sparse_entropy, device=valid.device)
    bonus[OP] = 0.0
    usable = (valid & free).unsqueeze(-1) & available
    weights = entropy_coefficient(config, progress) * everywhere + bonus * mean_weights(usable)
    return weights * shares


def not_yet(paid_off: Tensor) -> Tensor:
    """Return the share of the op's curiosity that is left at these values of paid_off, 1 to 0."""
    return remaining(paid_off, PAID_OFF_TARGET)


def remaining(paid_off: Tensor, target: float) -> Tensor:
    """Return a factor that falls from 1 to 0 as the share of paid-off episodes reaches a target."""
    return 1.0 - (paid_off / target).clamp(0.0, 1.0)


def exploration_coefficients(config: PPOConfig, *, paid_off: Tensor, shares: Tensor) -> Tensor:
    """Return the weight of KL(uniform, policy) of every head, [R, 8], times the head's weight.

    Until episodes pay off, every choice about a seed only costs, and the heads would learn to keep
    seeds from being judged. So every head but the op, which has `curiosity`, is held near uniform.
    """
    curious = remaining(paid_off, SPARSE_PAID_OFF_TARGET)
    sparse = config.exploration.sparse_curiosity * curious
    coefficients = config.exploration_kl + sparse.unsqueeze(-1).expand(-1, len(HEAD_NAMES))
    is_op = torch.arange(len(HEAD_NAMES), device=shares.device) == OP
    return torch.where(is_op, config.exploration_kl, coefficients) * shares


def curiosity_weights(config: PPOConfig, usable: Tensor, *, paid_off: Tensor) -> Tensor:
    """Return the weight of the op's curiosity at every usable step, [R, T].

    Args:
        config: the coefficients.
        usable: bool [R, T].
        paid_off: [R], share of the episodes of a row's task that pay off; the weight falls with it.
    """
    weight = config.exploration.op_curiosity * not_yet(paid_off)
    return weight.unsqueeze(-1) * mean_weights(usable.unsqueeze(-1)).squeeze(-1)


def curiosity(logits: Tensor, masks: Tensor, reference: Tensor) -> Tensor:
    """Return the closeness of the op to a reference, [...]: 1 - KL(reference, policy) / ln k.

    In this direction of the KL, an op that is never tried costs without bound. In the other
    direction, with a reference that mostly waits, always waiting would cost almost nothing. Where
    only one op is legal the result is 1.

    Args:
        logits: of all heads, [..., 8, K].
        masks: bool [..., 8, K].
        reference: logits of the ops, [ops].
    """
    ops = len(reference)
    legal = masks[..., OP, :ops]
    own = masked_log_softmax(logits[..., OP, :ops], legal)
    other = masked_log_softmax(reference.expand_as(own), legal)
    distance = torch.where(legal, other.exp() * (other - own), 0.0).sum(-1)
    return 1.0 - distance / legal.sum(-1).clamp(min=2).log()


def collapsed_heads(entropies: Tensor, counts: Tensor, floors: Tensor) -> Tensor:
    """Return bool [8]: heads whose mean entropy on the counted steps is below its floor.

    Args:
        entropies: [..., 8], from 0 to 1.
        counts: bool [..., 8], steps that could use the head.
        floors: [8].
    """
    means = (entropies.detach() * mean_weights(counts)).flatten(0, -2).sum(0)
    return (means < floors) & counts.flatten(0, -2).any(0)


def compute_entropy_floor_penalty(
    entropy: Mapping[str, Tensor],
    head_masks: Mapping[str, Tensor],
    entropy_floor: Mapping[str, float],
    penalty_coef: Mapping[str, float],
) -> Tensor:
    """Return the penalty of heads whose mean entropy is below its floor, a scalar.

    Args:
        entropy: {head: [...]}, from 0 to 1.
        head_masks: {head: bool [...]}, steps that could use the head; a head without any is not
            penalised.
        entropy_floor: {head: least mean entropy}; other heads have none.
        penalty_coef: {head: weight}.
    """
    heads = [head for head in entropy_floor if head in entropy]
    if not heads:
        return torch.zeros(())
    entropies = torch.stack([entropy[head] for head in heads], dim=-1)
    counts = torch.stack([head_masks[head] for head in heads], dim=-1).to(torch.bool)
    floors = entropies.new_tensor([entropy_floor[head] for head in heads])
    coefficients = entropies.new_tensor([penalty_coef[head] for head in heads])
    means = (entropies * mean_weights(counts)).flatten(0, -2).sum(0)
    shortfall = (floors - means).clamp(min=0.0)
    return (coefficients * shortfall.square() * counts.flatten(0, -2).any(0)).sum()


# ---- Self-imitation of the best episodes so far, until most episodes pay off


MOST_EPISODES = 16
"""Most episodes that are kept."""

MOST_ADVANTAGE = 5.0
"""Advantages of steps are clipped to this, in the critic's scale, so that none dominates."""

_KEPT = (
    *("raw_states", "blueprint_indices", "actions", "masks"),
    *("valid", "free", "potentials"),
)
"""Columns of an episode that are kept; observations are raw, as their statistics change."""


class GoodEpisodes:
    """The episodes with the highest returns so far: the best of every task, then the second best.

    Only episodes with a raw return above 0, that of waiting, are kept.

    Args:
        capacity: most episodes to keep, ranked in units of their tasks' returns; of equals the
            oldest is kept.
        device: device of the tensors.
    """

    def __init__(self, capacity: int = MOST_EPISODES, device: torch.device | str = "cpu") -> None:
        """Start without any."""
        self.capacity = capacity
        self.device = torch.device(device)
        self._tensors: dict[str, Tensor] = {}
        self.tasks: list[str] = []
        """Task of every kept episode."""

    def __len__(self) -> int:
        return len(self._tensors["rewards"]) if self._tensors else 0

    @torch.no_grad()
    def keep(self, batch: RolloutBatch, tasks: Sequence[str], scales: RewardScales) -> None:
        """Add the good episodes of a round.

        Args:
            batch: the round.
            tasks: task of every row.
            scales: divisors of returns, by task.
        """
        rewards = batch.rewards * batch.valid
        good = rewards.sum(1) > 0
        if not bool(good.any()):
            return
        new = {name: getattr(batch, name)[good] for name in _KEPT}
        new["rewards"] = rewards[good]
        names = [name for name, is_good in zip(tasks, good.tolist(), strict=True) if is_good]
        if self._tensors:
            new, names = _join(self._tensors, new), [*self.tasks, *names]
        returns = (new["rewards"].sum(1).cpu() / scales.units(names)).tolist()
        best = _best_of_each(names, returns)[: self.capacity]
        self._tensors = {name: tensor[best] for name, tensor in new.items()}
        self.tasks = [names[place] for place in best]

    def loss(
        self,
        policy: Policy,
        *,
        gamma: float,
        weights: Tensor,
        scales: RewardScales,
        value_scale: Tensor,
        part: int = 0,
        parts: int = 1,
    ) -> Tensor:
        """Return the negative mean log-probability of the actions, weighted by their advantages.

        The mean is over all steps of the episodes, whatever their weights.

        Args:
            policy: the policy that imitates.
            gamma: discount of one step.
            weights: [N], weight of every kept episode.
            scales: divisors of raw rewards, by task.
            value_scale: factor from the critic's values to normalised returns.
            part: which part of the episodes is used, so that a pass of several minibatches
                imitates each episode once.
            parts: number of parts; the loss of an empty part is 0.
        """
        kept = {name: tensor[part::parts] for name, tensor in self._tensors.items()}
        if not len(kept["rewards"]):
            return value_scale.new_zeros(())
        unit = scales.units(self.tasks[part::parts], self.device).unsqueeze(1)
        states = policy.normalizer.normalize(kept["raw_states"])
        scores = policy.network.score(
            states, kept["blueprint_indices"], kept["actions"], kept["masks"]
        )
        paid = kept["potentials"] / unit
        change = gamma * F.pad(paid[:, 1:], (0, 1)) - paid
        rewards = clip_rewards(kept["rewards"] / unit, change * kept["valid"])
        returns = discounted_returns(rewards, gamma) + paid
        returns = returns / value_scale
        gained = (returns - scores.baseline.detach()).clamp(0.0, MOST_ADVANTAGE)
        usable = (kept["valid"] & kept["free"]).to(gained.dtype)
        steps = usable.sum().clamp(min=1.0)
        wanted = gained * usable * weights[part::parts].unsqueeze(1)
        return -(scores.log_probs.sum(-1) * wanted).sum() / steps

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes."""
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return {"tensors": tensors, "tasks": list(self.tasks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these episodes."""
        saved = state["tensors"].items()
        self._tensors = {name: tensor.to(self.device) for name, tensor in saved}
        self.tasks = list(state["tasks"])


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return the discounted return from every step on, [R, T]."""
    later = torch.zeros_like(rewards[:, 0])
    returns = []
    for reward in reversed(rewards.unbind(1)):
        later = reward + gamma * later
        returns.append(later)
    return torch.stack(returns[::-1], dim=1)


def _best_of_each(tasks: Sequence[str], returns: Sequence[float]) -> list[int]:
    """Return the indices of all episodes: the best of every task first, then the second best."""
    order = sorted(range(len(returns)), key=lambda place: -returns[place])
    seen: dict[str, int] = {}
    ranks = {}
    for place in order:
        ranks[place] = seen[tasks[place]] = seen.get(tasks[place], -1) + 1
    return sorted(order, key=lambda place: ranks[place])


def _join(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return old and new episodes; the shorter are padded with steps that do not count."""
    steps = max(old["rewards"].shape[1], new["rewards"].shape[1])

    def pad(episodes: dict[str, Tensor]) -> dict[str, Tensor]:
        missing = steps - episodes["rewards"].shape[1]
        if not missing:
            return episodes
        padded = {}
        for name, tensor in episodes.items():
            # The last step is repeated, as its masks fit its actions, but it is not valid.
            last = tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])
            last = torch.zeros_like(last) if name in ("rewards", "valid", "potentials") else last
            padded[name] = torch.cat([tensor, last], dim=1)
        return padded

    old, new = pad(old), pad(new)
    return {name: torch.cat([old[name], new[name]]) for name in old}
