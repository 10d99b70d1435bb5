"""The documents' measurements on a batch of tensors, for whoever has the tensors at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.nissa.monitors.critic import check_advantage_bias
from esper.nissa.monitors.policy import HEAD_RATIO, RATIO_UNCHANGED

_MAX_LOG_RATIO = 20.0


def monitor_advantage_bias_by_op(
    advantages: Tensor, ops: Tensor, free: Tensor | None = None
) -> dict[str, dict[str, Any]]:
    """Return the shape of the advantages of each op that was taken.

    Args:
        advantages: [N].
        ops: int64 [N], the op of each decision.
        free: bool [N], decisions with a choice; all of them by default.

    Returns:
        {op: {"mean", "std", "n", "skew", "kurtosis", "positive", "is_biased"}}: kurtosis is that in
        excess of a normal distribution's, positive the share above 0. An op is biased when its
        mean is further from 0 than its deviation over more than 100 decisions.
    """
    chosen = torch.ones_like(ops, dtype=torch.bool) if free is None else free
    found: dict[str, dict[str, Any]] = {}
    for op in LifecycleOp:
        values = advantages[chosen & (ops == int(op))].to(torch.float64)
        count = values.numel()
        if count:
            std = float(values.std(correction=1)) if count > 1 else 0.0
            found[op.name] = {
                "mean": float(values.mean()),
                "std": std,
                "n": count,
                **_shape(values),
                "positive": float((values > 0).double().mean()),
            }
    biased = {finding.subject for finding in check_advantage_bias(found)}
    return {op: {**numbers, "is_biased": op in biased} for op, numbers in found.items()}


def _shape(values: Tensor) -> dict[str, float]:
    """Return skewness and excess kurtosis; both 0 where nothing varies."""
    centred = values - values.mean()
    variance = float((centred**2).mean())
    if variance <= 0:
        return {"skew": 0.0, "kurtosis": 0.0}
    return {
        "skew": float((centred**3).mean()) / variance**1.5,
        "kurtosis": float((centred**4).mean()) / variance**2 - 3.0,
    }


def monitor_per_head_ratios(
    old_log_probs: Mapping[str, Tensor],
    new_log_probs: Mapping[str, Tensor],
    used: Mapping[str, Tensor] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the range of each head's ratio, and how worrying it is.

    Args:
        old_log_probs: Per head [N], of the policy that acted.
        new_log_probs: Per head [N], of the policy after the update.
        used: Per head bool [N], decisions in which it was causal; all of them by default.

    Returns:
        {head: {"mean", "std", "min", "max", "level"}} with level "critical" above 10, "warning"
        above 3, "unchanged" within 0.99 to 1.01, else "ok". A head that was never used is left
        out.
    """
    found: dict[str, dict[str, Any]] = {}
    for head, old in old_log_probs.items():
        log_ratio = (new_log_probs[head] - old).to(torch.float64)
        if used is not None and head in used:
            log_ratio = log_ratio[used[head]]
        if not log_ratio.numel():
            continue
        ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        least, most = float(ratio.min()), float(ratio.max())
        found[head] = {
            "mean": float(ratio.mean()),
            "std": float(ratio.std(correction=0)),
            "min": least,
            "max": most,
            "level": _level(least, most),
        }
    return found


def _level(least: float, most: float) -> str:
    if (found := HEAD_RATIO.find(most, "")) is not None:
        return found.severity
    return "unchanged" if RATIO_UNCHANGED[0] < least and most < RATIO_UNCHANGED[1] else "ok"


def monitor_critic_op_sensitivity(q_values: Tensor) -> dict[str, Any]:
    """Return how much Q(s, op) depends on the op.

    Args:
        q_values: [N, ops], the critic's value of every op in every state.

    Returns:
        {"q_variance_across_ops": mean over states of the variance over ops, "q_op_spread":
        greatest minus least mean of an op, "q_per_op_mean": list}.
    """
    values = q_values.detach().to(torch.float64)
    per_op = values.mean(dim=0)
    return {
        "q_variance_across_ops": float(values.var(dim=-1).mean()),
        "q_op_spread": float(per_op.max() - per_op.min()),
        "q_per_op_mean": per_op.tolist(),
    }
