"""Advantages: how much better a decision turned out than the critic expected, and for which heads.

Time is the last axis everywhere; whatever comes before it are rows that never mix. Rows may end at
different times: after a step that terminated or was truncated nothing flows back into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import UsageError
from esper.tamiyo.policy.action_masks import causal_heads

STD_FLOOR = 0.1
"""Least deviation that advantages are divided by: below it, noise would be amplified."""


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the returns they imply, both [..., T].

    Args:
        rewards: [..., T], what each step paid.
        values: [..., T], the baseline of the state the step was taken in.
        next_values: [..., T], the baseline of the state after it: the next step's, or the
            bootstrap where the rollout was cut. It is not read where the episode terminated.
        terminated: bool [..., T], the episode ended: nothing follows that is worth anything.
        truncated: bool [..., T], the rollout was cut: what follows is worth `next_values`, but
            the step beside it belongs to something else.
        gamma: discount of one step; a tensor [..., T] where steps last for different times.
        gae_lambda: 0 trusts the critic after one step, 1 the rewards to the end.
    """
    shape = tuple(rewards.shape)
    given = {"values": values, "next_values": next_values}
    for name, tensor in {**given, "terminated": terminated, "truncated": truncated}.items():
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"{name} must have the shape of the rewards, {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
    # Where nothing follows, what is stored there may be anything, and 0 times NaN is NaN.
    following = torch.where(terminated, 0.0, gamma * next_values)
    errors = (rewards + following - values).unbind(-1)
    ends = (terminated | truncated).unbind(-1)
    decay = torch.as_tensor(gamma * gae_lambda, dtype=rewards.dtype, device=rewards.device)
    factors = decay.expand(shape).unbind(-1)
    advantages: list[Tensor] = []
    later = torch.zeros_like(rewards[..., 0])
    for error, end, factor in zip(errors[::-1], ends[::-1], factors[::-1], strict=True):
        later = torch.where(end, error, torch.addcmul(error, factor, later))
        advantages.append(later)
    stacked = torch.stack(advantages[::-1], dim=-1)
    return stacked, stacked + values


def compute_per_head_advantages(
    advantages: Tensor, ops: Tensor, free: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the advantage of every head: exactly 0 where its choice had no effect.

    Args:
        advantages: [...].
        ops: int64 [...], the op that was taken.
        free: bool [...], steps with more than one legal op; all of them by default.
    """
    counts = causal_heads(ops)
    if free is not None:
        counts = counts & free.unsqueeze(-1)
    per_head = torch.where(counts, advantages.unsqueeze(-1), 0.0)
    return dict(zip(HEAD_NAMES, per_head.unbind(-1), strict=True))


def normalize_advantages(
    advantages: Tensor, valid: Tensor, floor: float = STD_FLOOR
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return advantages with mean 0 and deviation 1 over the steps that count, and 0 elsewhere.

    Args:
        advantages: [...].
        valid: bool [...], the steps that count; all others leave the statistics untouched.
        floor: least deviation to divide by.

    Returns:
        The normalised advantages, the mean and the population deviation of the raw ones, and
        whether that deviation was below the floor; the last three are tensors without axes.
    """
    count = valid.sum().clamp(min=1)
    mean = torch.where(valid, advantages, 0.0).sum() / count
    centred = torch.where(valid, advantages - mean, 0.0)
    std = (centred.square().sum() / count).sqrt()
    return centred / std.clamp(min=floor), mean, std, std < floor
