"""Advantages: how much better a decision turned out than the critic expected, and for which heads.

Time is the last axis everywhere; whatever comes before it are rows that never mix. Rows may end at
different times: after a step that terminated or was truncated nothing flows back into it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
    gae_lambda: float | Tensor,
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
        gae_lambda: 0 trusts the critic after one step, 1 the rewards to the end; a tensor [..., T]
            where the critic is trusted in some of the states that follow and not in others.
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


def decision_lambda(free: Tensor, gae_lambda: float) -> Tensor:
    """Return the lambda [..., T] with which GAE sees steps without a choice as no steps at all.

    Where nothing can be decided next, what the critic says there is passed over: with a lambda of 1
    it cancels out. What is left is GAE from decision to decision, over what was paid in between
    and with a discount of gamma to the power of the steps that passed.

    Args:
        free: bool [..., T], steps with more than one legal op.
        gae_lambda: of one decision.
    """
    decides_next = F.pad(free[..., 1:], (0, 1), value=True)
    return torch.where(decides_next, gae_lambda, 1.0)


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
    advantages: Tensor,
    valid: Tensor,
    floor: float = STD_FLOOR,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return advantages with mean 0 and deviation 1 over the steps that count, and 0 elsewhere.

    Args:
        advantages: [R, ...].
        valid: bool [R, ...], the steps that count; all others leave the statistics untouched.
        floor: least deviation to divide by.
        groups: int64 [R], the group of every row, from 0. Each is divided by its own deviation, so
            that none is louder than another; then all are centred together, as a group of a few
            rows would lose what they have in common. One group by default.

    Returns:
        The normalised advantages, the mean and the population deviation of the raw ones, and
        whether that deviation was below the floor; the last three are tensors without axes.
    """
    everything = torch.zeros(len(advantages), dtype=torch.int64, device=advantages.device)
    mean, std = (each[0] for each in _group_moments(advantages, valid, everything))
    groups = everything if groups is None else groups
    _, own = _group_moments(advantages, valid, groups)
    even = advantages / _like(own.clamp(min=floor)[groups], advantages)
    centre = torch.where(valid, even, 0.0).sum() / valid.sum().clamp(min=1)
    return torch.where(valid, even - centre, 0.0), mean, std, std < floor


def _group_moments(values: Tensor, valid: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation of the valid values [R, ...] of every group."""
    number = int(groups.max()) + 1

    def add(each: Tensor) -> Tensor:
        by_row = torch.where(valid, each, 0.0).reshape(len(each), -1).sum(1)
        return values.new_zeros(number).index_add_(0, groups, by_row)

    count = add(torch.ones_like(values)).clamp(min=1)
    mean = add(values) / count
    return mean, (add((values - _like(mean[groups], values)).square()) / count).sqrt()


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return values [R] for every entry of a tensor [R, ...]."""
    return rows.view(-1, *[1] * (tensor.dim() - 1))
