"""The report of an update in the columns of the store, and counts of clamped observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.nissa.columns import Row
from esper.nissa.schema_runs import UpdateHeadRow, UpdateRow
from esper.tamiyo.policy.observation import CLIP, ObservationLayout

# ---- The documents' measurements on tensors


_MAX_LOG_RATIO = 20.0
BIAS_COUNT = 100  # An op is biased only over more decisions than this.
RATIO_WARNING, RATIO_CRITICAL = 3.0, 10.0
RATIO_UNCHANGED = (0.99, 1.01)


def monitor_advantage_bias_by_op(
    advantages: Tensor, ops: Tensor, free: Tensor | None = None
) -> dict[str, dict[str, Any]]:
    """Return moments of the advantages, by op.

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
            mean = float(values.mean())
            std = float(values.std(correction=1)) if count > 1 else 0.0
            found[op.name] = {
                "mean": mean,
                "std": std,
                "n": count,
                **_shape(values),
                "positive": float((values > 0).double().mean()),
                "is_biased": count > BIAS_COUNT and abs(mean) > std,
            }
    return found


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
    """Return statistics of each head's ratio, with a warning level.

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
    if most > RATIO_WARNING:
        return "critical" if most > RATIO_CRITICAL else "warning"
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


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A value that was NaN or infinite, so that no step was taken."""

    epoch: int
    """Optimisation epoch, from 0."""
    kind: str
    """Which value: 'log_prob', 'old_log_prob', 'value', 'gradient', or the name of a target."""
    heads: tuple[str, ...] = ()
    """The heads in which it was found, if any."""

    def __str__(self) -> str:
        where = f" of {', '.join(self.heads)}" if self.heads else ""
        return f"{self.kind}{where} in epoch {self.epoch}"


@dataclass(slots=True)
class UpdateReport:
    """Report of one update: one entry per pass, and one per pass and head."""

    updates: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `UpdateRow`, by name."""
    heads: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `UpdateHeadRow`, by name."""
    nonfinite: list[NonFinite] = field(default_factory=list)
    """Why the update was stopped, if it was."""
    steps: int = 0
    """Steps the optimizer took."""
    seconds: float = 0.0

    @property
    def explained_variance(self) -> float:
        """Explained variance of the critic's targets by its values in the rollout."""
        return float(self.updates[-1]["explained_variance"])

    @property
    def potential_share(self) -> float | None:
        """Share of the returns' variance that the reward's potential alone explains."""
        value = self.updates[-1]["potential_share"]
        return None if value is None else float(value)

    @property
    def approx_kl(self) -> float:
        """KL between the policy of the rollout and the one after the last step; NaN if skipped."""
        value = self.updates[-1].get("approx_kl")
        return float("nan") if value is None else float(value)

    def rows(self, round: int, env_steps: int) -> list[Row]:
        """Return the records to write, heads before the update they belong to."""
        shared: dict[str, Any] = {"round": round, "env_steps": env_steps}
        heads = [UpdateHeadRow(**row, **shared) for row in self.heads]
        return [*heads, *(UpdateRow(**row, **shared) for row in self.updates)]


def head_rows(ordinal: int, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return one entry per head from columns with one value per head."""
    return [
        {
            "ordinal": ordinal,
            "head": head,
            **{name: values[index] for name, values in columns.items()},
        }
        for index, head in enumerate(HEAD_NAMES)
    ]


class ClampCounter:
    """Counts the entries of measured features that were clamped.

    A feature whose formula clamps counts at its upper bound, and at its lower bound unless that is
    0; every feature counts at the clip of the normaliser.
    """

    def __init__(self, layout: ObservationLayout, device: torch.device | str) -> None:
        """Look up which features are clamped, and their bounds."""
        specs = layout.specs
        infinity = float("inf")

        def is_cut(formula: str) -> bool:
            return "clamp(" in formula or "min(" in formula

        measured = [spec.kind == "continuous" for spec in specs]
        high = [spec.high if is_cut(spec.formula) else infinity for spec in specs]
        low = [spec.low if is_cut(spec.formula) and spec.low < 0 else -infinity for spec in specs]
        self._measured = torch.tensor(measured, device=device)
        self._high = torch.tensor(high, device=device)
        self._low = torch.tensor(low, device=device)
        self._names = layout.names
        self._cut = torch.zeros(len(specs), dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)

    def start(self) -> None:
        """Start a new round."""
        self._cut.zero_()
        self._seen.zero_()

    def count(self, raw: Tensor, normalized: Tensor, active: Tensor) -> None:
        """Count observations [rows, features] of the rows that still run."""
        cut = (raw >= self._high) | (raw <= self._low) | (normalized.abs() >= CLIP)
        self._cut += (cut & self._measured & active.unsqueeze(1)).sum(0)
        self._seen += active.sum()

    @property
    def share(self) -> float:
        """Share of the measured entries that were clamped."""
        seen = int(self._seen) * int(self._measured.sum())
        return int(self._cut.sum()) / seen if seen else 0.0

    def worst(self, count: int = 5) -> dict[str, float]:
        """Return the features that were clamped most often, with their shares."""
        seen = int(self._seen)
        cut = self._cut.tolist()
        order = sorted(range(len(cut)), key=lambda index: (-cut[index], index))
        return {self._names[index]: cut[index] / seen for index in order[:count] if cut[index]}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"cut": self._cut.cpu().clone(), "seen": int(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from these counts."""
        self._cut.copy_(state["cut"])
        self._seen.fill_(state["seen"])
