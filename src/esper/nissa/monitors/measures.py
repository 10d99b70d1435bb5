"""The documents' measurements on a batch of tensors, and the traffic lights of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.nissa.monitors.critic import check_advantage_bias
from esper.nissa.monitors.policy import HEAD_RATIO_CRITICAL, HEAD_RATIO_WARNING, RATIO_UNCHANGED

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
    if most > HEAD_RATIO_CRITICAL:
        return "critical"
    if most > HEAD_RATIO_WARNING:
        return "warning"
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


Light = Literal["good", "watch", "bad", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a number stops being good and starts being bad."""

    watch: float
    bad: float
    meaning: str
    is_high_good: bool = False
    least: float | None = None
    """Below this it is to be watched as well."""


BANDS: dict[str, Band] = {
    "explained_variance": Band(
        watch=0.3, bad=0.0, is_high_good=True, meaning="how much of the returns the critic explains"
    ),
    "clipfrac": Band(watch=0.25, bad=0.3, meaning="how many decisions were clipped"),
    "approx_kl": Band(watch=0.015, bad=0.03, meaning="how far an update moved the policy"),
    "grad_norm": Band(watch=5.0, bad=10.0, meaning="size of the learner's gradient"),
    "ratio_max": Band(watch=1.5, bad=2.0, meaning="greatest joint ratio"),
    "wait_share_free": Band(watch=1.0, bad=1.0, meaning="waiting where it could act; 99 % is fine"),
    "pbrs_share": Band(watch=0.40, bad=1.0, least=0.10, meaning="shaping in the reward"),
    "anti_gaming_share": Band(watch=0.05, bad=0.10, meaning="decisions penalised for gaming"),
    "growth_ratio": Band(watch=2.0, bad=5.0, meaning="parameters over those of the host"),
    "obs_clamp_share": Band(watch=0.05, bad=0.10, meaning="observation entries at their clamp"),
    "feedback_dependence": Band(
        watch=0.3, bad=0.6, meaning="op probability that hangs on the last action alone"
    ),
    "stale_s": Band(watch=2.0, bad=5.0, meaning="seconds since the last record of a running run"),
}
"""By metric; a metric without a band has no colour."""


def light(metric: str, value: float | None) -> Light:
    """Return the colour of a number: unknown where it was not measured or has no band."""
    band = BANDS.get(metric)
    if band is None or value is None or math.isnan(value):
        return "unknown"
    if band.is_high_good:
        if value >= band.watch:
            return "good"
        return "watch" if value >= band.bad else "bad"
    if value >= band.bad:
        return "bad"
    if value >= band.watch or (band.least is not None and value < band.least):
        return "watch"
    return "good"
