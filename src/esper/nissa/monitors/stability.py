"""Monitors of numbers that must stay in range: gradients, log-probabilities, finiteness."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from esper.nissa.monitors.policy import was_used
from esper.nissa.monitors.table import (
    Finding,
    Recent,
    Series,
    findings,
    measured,
    register_monitor,
    smoothed,
)
from esper.nissa.schema import UpdateRow

GRADIENT_DRIFT = 0.5
GRADIENT_MEMORY = 0.99
GRADIENT_WARMUP = 10
GRADIENT_MIN = 1e-7
GRADIENT_MAX = 100.0
LOG_PROB_WARNING = -50.0
LOG_PROB_CRITICAL = -100.0
SKIPPED_CRITICAL = 3
HEAD_GRADIENT_UPDATES = 3


def check_gradient_drift(grad_norms: Series) -> Finding | None:
    """Find a gradient norm far from its moving average."""
    values = measured(grad_norms)
    if len(values) <= GRADIENT_WARMUP:
        return None
    average = smoothed(values[:-1], GRADIENT_MEMORY)
    if not average:
        return None
    drift = abs(values[-1] - average) / average
    if drift <= GRADIENT_DRIFT:
        return None
    return Finding(
        severity="info",
        value=drift,
        threshold=GRADIENT_DRIFT,
        message=f"the gradient norm {values[-1]:.3g} is {drift:.0%} away from its average "
        f"{average:.3g}",
    )


def check_gradient_norm(grad_norm: float | None) -> Finding | None:
    """Find a gradient that has vanished or exploded."""
    if grad_norm is None or GRADIENT_MIN <= grad_norm <= GRADIENT_MAX:
        return None
    if math.isnan(grad_norm):
        return None
    limit = GRADIENT_MAX if grad_norm > GRADIENT_MAX else GRADIENT_MIN
    return Finding(
        severity="critical" if grad_norm > GRADIENT_MAX else "warning",
        value=grad_norm,
        threshold=limit,
        message=f"the gradient norm is {grad_norm:.3g} (limit {limit:g})",
    )


def check_head_gradient(head: str, grad_norms: Series) -> Finding | None:
    """Find a head that has had a choice and no gradient for several updates, or far too much.

    A norm that is None says that the head had no choice; it neither counts nor breaks a row.
    """
    values = measured(grad_norms)
    if not values:
        return None
    last = values[-HEAD_GRADIENT_UPDATES:]
    is_dead = len(last) == HEAD_GRADIENT_UPDATES and max(last) < GRADIENT_MIN
    if not is_dead and last[-1] <= GRADIENT_MAX:
        return None
    limit = GRADIENT_MIN if is_dead else GRADIENT_MAX
    told = f" in {HEAD_GRADIENT_UPDATES} updates in a row" if is_dead else ""
    return Finding(
        severity="warning" if is_dead else "critical",
        subject=head,
        value=last[-1],
        threshold=limit,
        message=f"the gradient norm of the head {head} is {last[-1]:.3g}{told} (limit {limit:g})",
    )


def check_log_prob(log_prob_min: float | None) -> Finding | None:
    """Find actions that were all but impossible under the policy that took them."""
    if log_prob_min is None or log_prob_min >= LOG_PROB_WARNING:
        return None
    is_critical = log_prob_min < LOG_PROB_CRITICAL
    limit = LOG_PROB_CRITICAL if is_critical else LOG_PROB_WARNING
    return Finding(
        severity="critical" if is_critical else "warning",
        value=log_prob_min,
        threshold=limit,
        message=f"an action has the log-probability {log_prob_min:.3g} (limit {limit:g})",
    )


def check_skipped(was_skipped: Sequence[bool | None]) -> Finding | None:
    """Find updates that were skipped because something was not finite."""
    count = 0
    for skipped in reversed(was_skipped):
        if not skipped:
            break
        count += 1
    if not count:
        return None
    return Finding(
        severity="critical" if count >= SKIPPED_CRITICAL else "warning",
        value=float(count),
        threshold=float(SKIPPED_CRITICAL),
        message=f"{count} updates in a row were skipped because something was not finite",
    )


@register_monitor(
    "gradient_drift",
    reads=UpdateRow,
    thresholds="|norm - average| > 0.5 of the average (memory 0.99, after 10 updates): info",
    meaning="The learner's gradients have changed their scale.",
    advice="Look at what else changed at that round: rewards, returns, a head's entropy.",
)
def gradient_drift(recent: Recent) -> Iterator[Finding]:
    """Look at the gradient norms so far."""
    yield from findings(check_gradient_drift([row.grad_norm for row in recent.updates]))


@register_monitor(
    "gradient_norm",
    reads=UpdateRow,
    thresholds="< 1e-7 warning; > 100 critical",
    meaning="Gradients have vanished or exploded.",
    advice="Vanished: check advantages and masks. Exploded: check value targets and rewards.",
)
def gradient_norm(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    yield from findings(check_gradient_norm(recent.updates[-1].grad_norm))


@register_monitor(
    "head_gradient",
    reads=UpdateRow,
    thresholds="a head that had a choice: < 1e-7 in 3 updates in a row warning; > 100 critical",
    meaning="A head learns nothing although it had decisions to make, or its gradient explodes.",
    advice="Vanished: look at its conditional entropy and at the masks. Exploded: look at its "
    "ratios; its learning rate can be lowered alone (`--set ppo.lr_multipliers`).",
)
def head_gradient(recent: Recent) -> Iterator[Finding]:
    """Look at every head over the last updates."""
    for head, rows in recent.heads.items():
        yield from findings(
            check_head_gradient(head, [row.grad_norm if was_used(row) else None for row in rows])
        )


@register_monitor(
    "numerical_instability",
    reads=UpdateRow,
    thresholds="any NaN or infinite value: critical",
    meaning="The learner met numbers that are not finite.",
    advice="Run the policy in FP32; find the head and kind in the events of that round.",
)
def numerical_instability(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    count = recent.updates[-1].nonfinite
    if count:
        yield Finding(
            severity="critical",
            value=float(count),
            threshold=0.0,
            message=f"{count} values in the update were NaN or infinite",
        )


@register_monitor(
    "log_prob",
    reads=UpdateRow,
    thresholds="least < -50 warning, < -100 critical",
    meaning="An action was taken that its policy thinks impossible: sampling and scoring differ.",
    advice="Score with the masks and the floor that were used for sampling.",
)
def log_prob(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    yield from findings(check_log_prob(recent.updates[-1].log_prob_min))


@register_monitor(
    "skipped_updates",
    reads=UpdateRow,
    thresholds="1 warning; 3 in a row critical",
    meaning="Updates were skipped because a log-probability or value was not finite.",
    advice="Resume from an earlier checkpoint with a lower learning rate.",
)
def skipped_updates(recent: Recent) -> Iterator[Finding]:
    """Look at the newest updates."""
    yield from findings(check_skipped([row.was_skipped for row in recent.updates]))
