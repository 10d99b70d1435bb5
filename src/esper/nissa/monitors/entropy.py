"""Monitors of exploration: entropies of the unfloored policy, where a head had a choice.

An idle head is not a collapsed one: a head that was masked, or had one valid choice, has no
entropy to lose. And a sentinel that waits 99 % of the time is right: while most decisions change
nothing and the policy still acts at times, a low entropy of the op head alone is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from esper.leyline.actions import HEAD_SIZES
from esper.nissa.monitors.policy import was_used
from esper.nissa.monitors.table import (
    Finding,
    Recent,
    Series,
    findings,
    is_latched,
    register_monitor,
)
from esper.nissa.schema import UpdateRow

ENTROPY_WARNING = 0.3
ENTROPY_CRITICAL = 0.1

COLLAPSE: dict[str, float] = {"op": 0.08, "slot": 0.10, "blueprint": 0.05, "tempo": 0.05}
COLLAPSE_OTHER = 0.08
COLLAPSE_UPDATES = 3
COLLAPSE_RECOVERY = 1.5

NATS: dict[str, tuple[float, float]] = {
    "op": (1.0, 0.5),
    "slot": (0.6, 0.3),
    "blueprint": (1.5, 0.7),
    "style": (0.8, 0.4),
    "tempo": (0.6, 0.3),
    "alpha_target": (0.6, 0.3),
    "alpha_speed": (0.8, 0.4),
    "alpha_curve": (0.9, 0.5),
}
"""Entropy in nats below which a head with all its choices valid warns, and is critical."""

SPARSE_USAGE = 0.10


def nats_thresholds(head: str, valid_actions: float) -> tuple[float, float] | None:
    """Return (warning, critical) in nats for so many valid choices; None where there is no limit.

    The documents give them for all choices of a head; they scale with the greatest entropy there
    can be, ln(valid choices).
    """
    if head not in NATS or valid_actions <= 1:
        return None
    scale = math.log(valid_actions) / math.log(HEAD_SIZES[head])
    warning, critical = NATS[head]
    return warning * scale, critical * scale


def is_sentinel(idle_share_free: float | None) -> bool:
    """Return whether the policy mostly waits and still acts: what it is meant to do.

    An ADVANCE before its gate opens is waiting too.
    """
    return idle_share_free is not None and 0.5 <= idle_share_free < 1.0


def check_entropy(entropy: float | None) -> Finding | None:
    """Find a policy whose heads, taken together, hardly explore."""
    if entropy is None or entropy >= ENTROPY_WARNING:
        return None
    is_critical = entropy < ENTROPY_CRITICAL
    limit = ENTROPY_CRITICAL if is_critical else ENTROPY_WARNING
    return Finding(
        severity="critical" if is_critical else "warning",
        value=entropy,
        threshold=limit,
        message=f"the mean normalised entropy is {entropy:.3g} (limit {limit:g})",
    )


def check_head_collapse(head: str, conditional: Series) -> Finding | None:
    """Find a head that has been deterministic for several updates and has not recovered."""
    limit = COLLAPSE.get(head, COLLAPSE_OTHER)
    leave = COLLAPSE_RECOVERY * limit
    if not is_latched(conditional, enter=limit, leave=leave, consecutive=COLLAPSE_UPDATES):
        return None
    value = next((one for one in reversed(conditional) if one is not None), None)
    return Finding(
        severity="critical",
        subject=head,
        value=value,
        threshold=limit,
        message=f"the head {head} has collapsed: normalised entropy below {limit:g} for "
        f"{COLLAPSE_UPDATES} updates where it had a choice",
    )


def check_head_nats(head: str, entropy_nats: float | None, valid: float | None) -> Finding | None:
    """Find a head whose entropy in nats is low for the number of choices it had."""
    limits = nats_thresholds(head, HEAD_SIZES.get(head, 0) if valid is None else valid)
    if limits is None or entropy_nats is None or entropy_nats >= limits[0]:
        return None
    is_critical = entropy_nats < limits[1]
    limit = limits[1] if is_critical else limits[0]
    return Finding(
        severity="critical" if is_critical else "warning",
        subject=head,
        value=entropy_nats,
        threshold=limit,
        message=f"the entropy of the head {head} is {entropy_nats:.3g} nats (limit {limit:.3g})",
    )


def monitor_sparse_head_entropy(
    entropy_nats: Mapping[str, float | None],
    usage: Mapping[str, float | None],
    valid_actions: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Find heads that became deterministic before they were used enough to have learned it.

    Args:
        entropy_nats: Entropy of each head where it had a choice; None where it never had.
        usage: Share of decisions in which the head was causal.
        valid_actions: Mean number of valid choices; all of them by default.

    Returns:
        One critical finding for each head under its warning threshold and used in less than a
        tenth of the decisions. A head that was never used has shown nothing and is left out.
    """
    found = []
    for head, entropy in entropy_nats.items():
        used = usage.get(head)
        valid = (valid_actions or {}).get(head, float(HEAD_SIZES.get(head, 0)))
        limits = nats_thresholds(head, valid)
        if limits is None or entropy is None or not used or used >= SPARSE_USAGE:
            continue
        if entropy < limits[0]:
            found.append(
                Finding(
                    severity="critical",
                    subject=head,
                    value=entropy,
                    threshold=limits[0],
                    message=f"the head {head} is down to {entropy:.3g} nats although only "
                    f"{100 * used:.1f} % of decisions used it",
                )
            )
    return found


@register_monitor(
    "entropy",
    reads=UpdateRow,
    thresholds="mean normalised < 0.3 warning, < 0.1 critical",
    meaning="The heads as a whole hardly explore any more.",
    advice="Raise the exploration term; if it happened early, lower the learning rate.",
)
def entropy(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    yield from findings(check_entropy(recent.updates[-1].entropy))


@register_monitor(
    "head_collapse",
    reads=UpdateRow,
    thresholds="normalised, conditional: op < 0.08, slot < 0.10, blueprint and tempo < 0.05, "
    "others < 0.08, in 3 updates in a row; clears above 1.5 times that",
    meaning="A head always chooses the same where it has a choice, and its gradient is gone.",
    advice="The KL-to-uniform term keeps a gradient at collapse: raise it. Or reset that head and "
    "resume (`--reset-heads`). A probability floor supplies data, not gradient.",
)
def head_collapse(recent: Recent) -> Iterator[Finding]:
    """Look at every head over the last updates."""
    for head, rows in recent.heads.items():
        if head == "op" and is_sentinel(_idle_share(recent)):
            continue
        series = [row.entropy_conditional if was_used(row) else None for row in rows]
        yield from findings(check_head_collapse(head, series))


@register_monitor(
    "head_entropy_nats",
    reads=UpdateRow,
    thresholds="nats, for all choices valid (scaled by ln of the valid ones): op 1.0/0.5, "
    "slot 0.6/0.3, blueprint 1.5/0.7, style 0.8/0.4, tempo 0.6/0.3, alpha_target 0.6/0.3, "
    "alpha_speed 0.8/0.4, alpha_curve 0.9/0.5 (warning/critical)",
    meaning="A head explores less than it should for the choices it has.",
    advice="Raise that head's entropy multiplier (1.3 to 1.5), or the exploration term.",
)
def head_entropy_nats(recent: Recent) -> Iterator[Finding]:
    """Look at every head in the newest update."""
    for head, rows in recent.heads.items():
        if not was_used(rows[-1]) or (head == "op" and is_sentinel(_idle_share(recent))):
            continue
        yield from findings(check_head_nats(head, rows[-1].entropy_nats, rows[-1].valid_actions))


@register_monitor(
    "sparse_head_entropy",
    reads=UpdateRow,
    thresholds="under the warning in nats while the head is used in < 10 % of decisions: critical",
    meaning="A sparse head became deterministic for lack of feedback, not because it learned.",
    advice="Raise its entropy multiplier; check that entropy is summed over all heads on every "
    "step and that its advantages are masked by cause, not by accident.",
)
def sparse_head_entropy(recent: Recent) -> Iterator[Finding]:
    """Look at every head in the newest update."""
    newest = {
        head: rows[-1] for head, rows in recent.heads.items() if head != "op" and was_used(rows[-1])
    }
    yield from monitor_sparse_head_entropy(
        {head: row.entropy_nats for head, row in newest.items()},
        {head: row.usage for head, row in newest.items()},
        {head: row.valid_actions for head, row in newest.items() if row.valid_actions is not None},
    )


def _idle_share(recent: Recent) -> float | None:
    return recent.rounds[-1].idle_share_free if recent.rounds else None
