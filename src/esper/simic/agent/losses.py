"""The surrogate of PPO over eight heads, and the loss of the critic.

Heads are the last axis of every tensor. Which steps count, and how much, is a tensor of weights
that was made once for the whole round: where a weight is 0 nothing is learned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.errors import UsageError

HEAD_LOG_RATIO = 20.0
"""Largest magnitude of a head's log-ratio; beyond it a float32 would overflow."""

JOINT_LOG_RATIO = 30.0
"""Largest magnitude of the joint log-ratio."""


def head_ratios(log_ratios: Tensor) -> Tensor:
    """Return the ratio of every head, [..., heads]."""
    return log_ratios.clamp(-HEAD_LOG_RATIO, HEAD_LOG_RATIO).exp()


def joint_ratio(log_ratios: Tensor) -> Tensor:
    """Return the product over heads, [...]; a head that did not matter has a log-ratio of 0."""
    return log_ratios.sum(-1).clamp(-JOINT_LOG_RATIO, JOINT_LOG_RATIO).exp()


def surrogate_losses(
    log_ratios: Tensor, advantages: Tensor, weights: Tensor, clip: float, *, joint: bool
) -> Tensor:
    """Return the clipped surrogate: one loss per head, or one for the joint action ([1]).

    Args:
        log_ratios: [..., heads], new minus old log-probability; 0 where a head did not matter.
        advantages: [...].
        weights: share of each step in the mean, [..., heads], or [..., 1] for the joint action.
        clip: a ratio pays up to 1 + clip and down to 1 - clip.
        joint: clip the product over heads instead of each head's own ratio.
    """
    ratio = joint_ratio(log_ratios).unsqueeze(-1) if joint else head_ratios(log_ratios)
    gains = advantages.unsqueeze(-1) * weights
    paid = torch.minimum(gains * ratio, gains * ratio.clamp(1.0 - clip, 1.0 + clip))
    return -paid.flatten(0, -2).sum(0)


def compute_ppo_loss(
    *,
    old_log_probs: Mapping[str, Tensor],
    new_log_probs: Mapping[str, Tensor],
    advantages: Tensor,
    clip_epsilon: float = 0.2,
    joint: bool = False,
    masks: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the clipped surrogate of any heads as one number.

    Args:
        old_log_probs: {head: [N]}, of the policy that acted.
        new_log_probs: {head: [N]}, of the policy that learns.
        advantages: [N].
        clip_epsilon: a ratio pays up to 1 plus this and down to 1 minus this.
        joint: clip the product over heads instead of each head's own ratio.
        masks: {head: bool [N]}, steps at which the head mattered; all of them by default. A head
            is averaged over its own steps; the joint action over steps with any head at all.

    Raises:
        UsageError: The heads of the arguments differ.
    """
    heads = list(old_log_probs)
    for name, given in (("new_log_probs", new_log_probs), ("masks", masks)):
        if given is not None and set(given) != set(heads):
            raise UsageError(
                f"{name} must have the heads of old_log_probs ({', '.join(heads)}), "
                f"got {', '.join(given)}"
            )
    old = torch.stack([old_log_probs[head] for head in heads], dim=-1)
    new = torch.stack([new_log_probs[head] for head in heads], dim=-1)
    if masks is None:
        counts = torch.ones_like(old, dtype=torch.bool)
    else:
        counts = torch.stack([masks[head] for head in heads], dim=-1).to(torch.bool)
    log_ratios = torch.where(counts, new - old.detach(), 0.0)
    counts = counts.any(-1, keepdim=True) if joint else counts
    weights = mean_weights(counts)
    return surrogate_losses(log_ratios, advantages, weights, clip_epsilon, joint=joint).sum()


def mean_weights(counts: Tensor) -> Tensor:
    """Return weights [..., heads] that average each head over the steps at which it counts."""
    weights = counts.to(torch.float32)
    return weights / weights.flatten(0, -2).sum(0).clamp(min=1.0)


def value_errors(
    values: Tensor, targets: Tensor, old_values: Tensor, value_clip: float = 0.0
) -> Tensor:
    """Return half the squared error of every step, [...].

    With `value_clip` a value may move at most that far from its old one: the worse of both errors
    counts, so that nothing is gained beyond.
    """
    errors = (values - targets).square()
    if value_clip > 0:
        moved = old_values + (values - old_values).clamp(-value_clip, value_clip)
        errors = torch.maximum(errors, (moved - targets).square())
    return 0.5 * errors
