"""Monitors of the policy: its updates (ratios, KL, stagnation) and its exploration (entropies).

Ratios and KL are measured after the update, entropies on the policy without probability floors. A
head that was masked, or had one valid choice, has no entropy to lose and is not judged. A policy
that waits in 99 % of its decisions and acts at times is right, so a low entropy of its op head
raises no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from esper.leyline.actions import HEAD_SIZES
from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    find_lasting,
    is_latched,
    register_monitor,
)
from esper.nissa.schema_runs import UpdateHeadRow, UpdateRow

JOINT_RATIO_MAX = Limits(critical=5.0)
JOINT_RATIO_MIN = Limits(warning=0.1, is_floor=True)
JOINT_RATIO_UPDATES = 3
HEAD_RATIO = Limits(warning=3.0, critical=10.0)
RATIO_UNCHANGED = (0.99, 1.01)
KL = Limits(warning=0.1, critical=0.5)
KL_STAGNANT = 1e-6
STAGNANT_UPDATES = 5


def was_used(row: UpdateHeadRow) -> bool:
    """Return whether a head had a choice to make; without one it is not judged."""
    had_steps = row.free_steps is None or row.free_steps > 0
    had_choice = row.valid_actions is None or row.valid_actions > 1
    return had_steps and had_choice and row.usage != 0


@register_monitor(
    reads=UpdateRow,
    thresholds="in 3 updates in a row: greatest > 5 critical; least < 0.1 warning",
    advice="Lower the learning rate or the epochs per update, or set a KL limit.",
)
def joint_ratio(recent: Recent) -> Iterator[Finding]:
    """Update after update changes the probability of some action far beyond the clip range."""
    # The joint ratio is a product of up to eight: a single update may exceed a limit by chance.
    yield from find_lasting(recent.updates, JOINT_RATIO_UPDATES, _joint_ratio)


def _joint_ratio(row: UpdateRow) -> Iterator[Finding | None]:
    grew = "the joint ratio reached {value:.3g} (limit {limit:g})"
    fell = "the joint ratio fell to {value:.3g} (limit {limit:g})"
    yield JOINT_RATIO_MAX.find(row.ratio_max, grew, subject="explosion")
    yield JOINT_RATIO_MIN.find(row.ratio_min, fell, subject="collapse")


@register_monitor(
    reads=UpdateRow,
    thresholds="greatest > 3 warning, > 10 critical; all of them within 0.99 to 1.01 info",
    advice="Look at that head's advantages and gradient norm first; then lower the learning rate. "
    "If nothing moves, check that advantages are not zero and that gradients arrive.",
)
def head_ratio(recent: Recent) -> Iterator[Finding | None]:
    """One head moved too far while the joint ratio may look fine; or no head moved at all."""
    newest = [rows[-1] for rows in recent.heads.values() if was_used(rows[-1])]
    for row in newest:
        message = f"the ratio of the head {row.head} reached {{value:.3g}} (limit {{limit:g}})"
        yield HEAD_RATIO.find(row.ratio_max, message, subject=row.head)
    low, high = RATIO_UNCHANGED
    known = [
        (row.ratio_min, row.ratio_max)
        for row in newest
        if row.ratio_min is not None and row.ratio_max is not None
    ]
    if known and all(least > low and most < high for least, most in known):
        message = "every head's ratio is within 0.99 to 1.01: the update changed nothing"
        yield Finding("info", message, threshold=high, subject="all heads")


@register_monitor(
    reads=UpdateRow,
    thresholds="> 0.1 nats warning, > 0.5 critical",
    advice="Lower the learning rate, set or lower target_kl, use fewer epochs per update.",
)
def kl_spike(recent: Recent) -> Iterator[Finding | None]:
    """The policy moved so far in one update that the data it learned from is stale."""
    message = "the KL of an update is {value:.3g} nats (limit {limit:g})"
    yield KL.find(recent.updates[-1].approx_kl, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="KL < 1e-6 and nothing clipped in 5 updates in a row that had free decisions",
    advice="Check conditional entropies: a collapsed head has no gradient left. Raise the "
    "exploration term, or reset the collapsed heads and resume.",
)
def policy_stagnation(recent: Recent) -> Iterator[Finding | None]:
    """The policy has stopped learning; KL is measured after the step, so 0 is no artefact."""
    rows = list(recent.updates)[-STAGNANT_UPDATES:]
    is_still = all(
        row.approx_kl is not None
        and abs(row.approx_kl) < KL_STAGNANT
        and not (row.clipfrac or 0.0) > 0
        and row.usable_steps != 0
        for row in rows
    )
    if len(rows) == STAGNANT_UPDATES and is_still:
        message = (
            f"the policy has not changed for {STAGNANT_UPDATES} updates (KL below "
            f"{KL_STAGNANT:g}, nothing clipped)"
        )
        yield Finding("warning", message, rows[-1].approx_kl, KL_STAGNANT)


# ------------------------------------------------------------------------------------ exploration

ENTROPY = Limits(warning=0.3, critical=0.1, is_floor=True)

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
"""Warning and critical entropy of a head with all its choices valid, in nats."""

SPARSE_USAGE = 0.10


def nats_thresholds(head: str, valid_actions: float) -> Limits | None:
    """Return the limits in nats for a number of valid choices; None without a choice.

    `NATS` holds for all choices of a head; it scales with the greatest entropy, ln(valid choices).
    """
    if head not in NATS or valid_actions <= 1:
        return None
    scale = math.log(valid_actions) / math.log(HEAD_SIZES[head])
    warning, critical = NATS[head]
    return Limits(warning=warning * scale, critical=critical * scale, is_floor=True)


def monitor_sparse_head_entropy(
    entropy_nats: Mapping[str, float | None],
    usage: Mapping[str, float | None],
    valid_actions: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return a finding for each rarely used head that has become deterministic.

    Args:
        entropy_nats: Entropy of each head where it had a choice; None where it never had.
        usage: Share of decisions in which the head was causal.
        valid_actions: Mean number of valid choices; all of them by default.

    Returns:
        One critical finding for each head under its warning threshold and used in less than a
        tenth of the decisions. A head that was never used has shown nothing and is left out.
    """
    found: list[Finding] = []
    for head, entropy in entropy_nats.items():
        used = usage.get(head)
        valid = (valid_actions or {}).get(head, float(HEAD_SIZES.get(head, 0)))
        limits = nats_thresholds(head, valid)
        if limits is None or not used or used >= SPARSE_USAGE:
            continue
        message = (
            f"the head {head} is down to {{value:.3g}} nats although only {100 * used:.1f} % of "
            "decisions used it"
        )
        sparse = Limits(critical=limits.warning, is_floor=True).find(entropy, message, subject=head)
        if sparse is not None:
            found.append(sparse)
    return found


@register_monitor(
    reads=UpdateRow,
    thresholds="mean normalised < 0.3 warning, < 0.1 critical",
    advice="Raise the exploration term; if it happened early, lower the learning rate.",
)
def entropy(recent: Recent) -> Iterator[Finding | None]:
    """The heads as a whole hardly explore any more."""
    message = "the mean normalised entropy is {value:.3g} (limit {limit:g})"
    yield ENTROPY.find(recent.updates[-1].entropy, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="normalised, conditional: op < 0.08, slot < 0.10, blueprint and tempo < 0.05, "
    "others < 0.08, in 3 updates in a row; clears above 1.5 times that",
    advice="The KL-to-uniform term keeps a gradient at collapse: raise it. Or reset that head and "
    "resume (`--reset-heads`). A probability floor supplies data, not gradient.",
)
def head_collapse(recent: Recent) -> Iterator[Finding | None]:
    """A head always chooses the same where it has a choice, and its gradient is gone."""
    for head, rows in _judged_heads(recent):
        limit = COLLAPSE.get(head, COLLAPSE_OTHER)
        leave = COLLAPSE_RECOVERY * limit
        series = [row.entropy_conditional if was_used(row) else None for row in rows]
        if is_latched(series, enter=limit, leave=leave, consecutive=COLLAPSE_UPDATES):
            value = next((one for one in reversed(series) if one is not None), None)
            message = (
                f"the head {head} has collapsed: normalised entropy below {limit:g} for "
                f"{COLLAPSE_UPDATES} updates where it had a choice"
            )
            yield Finding("critical", message, value, limit, subject=head)


def _judged_heads(recent: Recent) -> Iterator[tuple[str, Sequence[UpdateHeadRow]]]:
    """Yield the heads whose entropy is judged: not the op where most decisions wait, some act."""
    # An ADVANCE before its gate opens counts as waiting.
    idle = recent.rounds[-1].idle_share_free if recent.rounds else None
    waits_and_acts = idle is not None and 0.5 <= idle < 1.0
    for head, rows in recent.heads.items():
        if head != "op" or not waits_and_acts:
            yield head, rows


@register_monitor(
    reads=UpdateRow,
    thresholds="nats, for all choices valid (scaled by ln of the valid ones): op 1.0/0.5, "
    "slot 0.6/0.3, blueprint 1.5/0.7, style 0.8/0.4, tempo 0.6/0.3, alpha_target 0.6/0.3, "
    "alpha_speed 0.8/0.4, alpha_curve 0.9/0.5 (warning/critical)",
    advice="Raise that head's entropy multiplier (1.3 to 1.5), or the exploration term.",
)
def head_entropy_nats(recent: Recent) -> Iterator[Finding | None]:
    """A head explores less than it should for the choices it has."""
    for head, rows in _judged_heads(recent):
        newest = rows[-1]
        valid = newest.valid_actions
        limits = nats_thresholds(head, HEAD_SIZES.get(head, 0) if valid is None else valid)
        if was_used(newest) and limits is not None:
            message = f"the entropy of the head {head} is {{value:.3g}} nats (limit {{limit:.3g}})"
            yield limits.find(newest.entropy_nats, message, subject=head)


@register_monitor(
    reads=UpdateRow,
    thresholds="under the warning in nats while the head is used in < 10 % of decisions: critical",
    advice="Raise its entropy multiplier; check that entropy is summed over all heads on every "
    "step and that its advantages are masked by cause, not by accident.",
)
def sparse_head_entropy(recent: Recent) -> Iterator[Finding]:
    """A sparse head became deterministic for lack of feedback, not because it learned."""
    newest = {
        head: rows[-1] for head, rows in recent.heads.items() if head != "op" and was_used(rows[-1])
    }
    yield from monitor_sparse_head_entropy(
        {head: row.entropy_nats for head, row in newest.items()},
        {head: row.usage for head, row in newest.items()},
        {head: row.valid_actions for head, row in newest.items() if row.valid_actions is not None},
    )
