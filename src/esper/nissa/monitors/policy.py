"""Monitors of the policy: its steps (ratios, KL, stagnation) and its exploration (entropies).

Steps are measured after the update, entropies on the unfloored policy where a head had a choice.
An idle head is not a collapsed one: a head that was masked, or had one valid choice, has no
entropy to lose. And a sentinel that waits 99 % of the time is right: while most decisions change
nothing and the policy still acts at times, a low entropy of the op head alone is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from esper.leyline.actions import HEAD_SIZES
from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    Series,
    findings,
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


def check_joint_ratio(ratio_max: float | None, ratio_min: float | None) -> Iterator[Finding]:
    """Find joint ratios that exploded or collapsed."""
    grew, fell = "the joint ratio reached {value:.3g}", "the joint ratio fell to {value:.3g}"
    limit = " (limit {limit:g})"
    return findings(
        JOINT_RATIO_MAX.find(ratio_max, grew + limit, subject="explosion"),
        JOINT_RATIO_MIN.find(ratio_min, fell + limit, subject="collapse"),
    )


def check_lasting_ratio(updates: Sequence[UpdateRow]) -> Iterator[Finding]:
    """Find joint ratios beyond their limits in each of the last few updates.

    The joint ratio is a product of up to eight: a single decision may leave the range although no
    head moved far. Once is chance; an update that went too far shows in its KL and in the heads.
    """
    last = list(updates)[-JOINT_RATIO_UPDATES:]
    if len(last) < JOINT_RATIO_UPDATES:
        return
    each = [
        {found.subject: found for found in check_joint_ratio(row.ratio_max, row.ratio_min)}
        for row in last
    ]
    yield from (found for subject, found in each[-1].items() if all(subject in one for one in each))


def check_head_ratio(head: str, ratio_max: float | None) -> Finding | None:
    """Find a head whose own ratio is too large, however healthy the joint one looks."""
    message = f"the ratio of the head {head} reached {{value:.3g}} (limit {{limit:g}})"
    return HEAD_RATIO.find(ratio_max, message, subject=head)


def is_unchanged(ranges: Mapping[str, tuple[float | None, float | None]]) -> bool:
    """Return whether every head that was used kept its ratio at 1; ranges are (least, greatest)."""
    low, high = RATIO_UNCHANGED
    used = [(least, most) for least, most in ranges.values() if None not in (least, most)]
    return bool(used) and all(
        least is not None and most is not None and least > low and most < high
        for least, most in used
    )


def check_kl(approx_kl: float | None) -> Finding | None:
    """Find an update that took the policy too far."""
    return KL.find(approx_kl, "the KL of an update is {value:.3g} nats (limit {limit:g})")


def check_stagnation(approx_kl: Series, clipfrac: Series, usable_steps: Series) -> Finding | None:
    """Find a policy that has stopped changing although it had decisions to learn from."""
    rows = list(zip(approx_kl, clipfrac, usable_steps, strict=True))[-STAGNANT_UPDATES:]
    if len(rows) < STAGNANT_UPDATES:
        return None
    for kl, clipped, usable in rows:
        if kl is None or abs(kl) >= KL_STAGNANT or (clipped or 0.0) > 0 or usable == 0:
            return None
    message = (
        f"the policy has not changed for {STAGNANT_UPDATES} updates (KL below "
        f"{KL_STAGNANT:g}, nothing clipped)"
    )
    return Finding("warning", message, rows[-1][0], KL_STAGNANT)


def was_used(row: UpdateHeadRow) -> bool:
    """Return whether a head had a choice to make; one that never had is healthy by definition."""
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
    yield from check_lasting_ratio(recent.updates)


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
        yield check_head_ratio(row.head, row.ratio_max)
    if is_unchanged({row.head: (row.ratio_min, row.ratio_max) for row in newest}):
        message = "every head's ratio is within 0.99 to 1.01: the update changed nothing"
        yield Finding("info", message, threshold=RATIO_UNCHANGED[1], subject="all heads")


@register_monitor(
    reads=UpdateRow,
    thresholds="> 0.1 nats warning, > 0.5 critical",
    advice="Lower the learning rate, set or lower target_kl, use fewer epochs per update.",
)
def kl_spike(recent: Recent) -> Iterator[Finding | None]:
    """The policy moved so far in one update that the data it learned from is stale."""
    yield check_kl(recent.updates[-1].approx_kl)


@register_monitor(
    reads=UpdateRow,
    thresholds="KL < 1e-6 and nothing clipped in 5 updates in a row that had free decisions",
    advice="Check conditional entropies: a collapsed head has no gradient left. Raise the "
    "exploration term, or reset the collapsed heads and resume.",
)
def policy_stagnation(recent: Recent) -> Iterator[Finding | None]:
    """The policy has stopped learning; KL is measured after the step, so 0 is no artefact."""
    rows = recent.updates
    yield check_stagnation(
        [row.approx_kl for row in rows],
        [row.clipfrac for row in rows],
        [row.usable_steps for row in rows],
    )


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
"""Entropy in nats below which a head with all its choices valid warns, and is critical."""

SPARSE_USAGE = 0.10


def nats_thresholds(head: str, valid_actions: float) -> Limits | None:
    """Return the limits in nats for so many valid choices; None where there is none.

    The documents give them for all choices of a head; they scale with the greatest entropy there
    can be, ln(valid choices).
    """
    if head not in NATS or valid_actions <= 1:
        return None
    scale = math.log(valid_actions) / math.log(HEAD_SIZES[head])
    warning, critical = NATS[head]
    return Limits(warning=warning * scale, critical=critical * scale, is_floor=True)


def is_sentinel(idle_share_free: float | None) -> bool:
    """Return whether the policy mostly waits and still acts: what it is meant to do.

    An ADVANCE before its gate opens is waiting too.
    """
    return idle_share_free is not None and 0.5 <= idle_share_free < 1.0


def check_entropy(entropy: float | None) -> Finding | None:
    """Find a policy whose heads, taken together, hardly explore."""
    return ENTROPY.find(entropy, "the mean normalised entropy is {value:.3g} (limit {limit:g})")


def check_head_collapse(head: str, conditional: Series) -> Finding | None:
    """Find a head that has been deterministic for several updates and has not recovered."""
    limit = COLLAPSE.get(head, COLLAPSE_OTHER)
    leave = COLLAPSE_RECOVERY * limit
    if not is_latched(conditional, enter=limit, leave=leave, consecutive=COLLAPSE_UPDATES):
        return None
    value = next((one for one in reversed(conditional) if one is not None), None)
    message = (
        f"the head {head} has collapsed: normalised entropy below {limit:g} for "
        f"{COLLAPSE_UPDATES} updates where it had a choice"
    )
    return Finding("critical", message, value, limit, subject=head)


def check_head_nats(head: str, entropy_nats: float | None, valid: float | None) -> Finding | None:
    """Find a head whose entropy in nats is low for the number of choices it had."""
    limits = nats_thresholds(head, HEAD_SIZES.get(head, 0) if valid is None else valid)
    message = f"the entropy of the head {head} is {{value:.3g}} nats (limit {{limit:.3g}})"
    return None if limits is None else limits.find(entropy_nats, message, subject=head)


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
        if limits is None or not used or used >= SPARSE_USAGE:
            continue
        message = (
            f"the head {head} is down to {{value:.3g}} nats although only {100 * used:.1f} % of "
            "decisions used it"
        )
        sparse = Limits(critical=limits.warning, is_floor=True)
        found.append(sparse.find(entropy, message, subject=head))
    return list(findings(*found))


@register_monitor(
    reads=UpdateRow,
    thresholds="mean normalised < 0.3 warning, < 0.1 critical",
    advice="Raise the exploration term; if it happened early, lower the learning rate.",
)
def entropy(recent: Recent) -> Iterator[Finding | None]:
    """The heads as a whole hardly explore any more."""
    yield check_entropy(recent.updates[-1].entropy)


@register_monitor(
    reads=UpdateRow,
    thresholds="normalised, conditional: op < 0.08, slot < 0.10, blueprint and tempo < 0.05, "
    "others < 0.08, in 3 updates in a row; clears above 1.5 times that",
    advice="The KL-to-uniform term keeps a gradient at collapse: raise it. Or reset that head and "
    "resume (`--reset-heads`). A probability floor supplies data, not gradient.",
)
def head_collapse(recent: Recent) -> Iterator[Finding | None]:
    """A head always chooses the same where it has a choice, and its gradient is gone."""
    for head, rows in recent.heads.items():
        if head == "op" and is_sentinel(_idle_share(recent)):
            continue
        series = [row.entropy_conditional if was_used(row) else None for row in rows]
        yield check_head_collapse(head, series)


@register_monitor(
    reads=UpdateRow,
    thresholds="nats, for all choices valid (scaled by ln of the valid ones): op 1.0/0.5, "
    "slot 0.6/0.3, blueprint 1.5/0.7, style 0.8/0.4, tempo 0.6/0.3, alpha_target 0.6/0.3, "
    "alpha_speed 0.8/0.4, alpha_curve 0.9/0.5 (warning/critical)",
    advice="Raise that head's entropy multiplier (1.3 to 1.5), or the exploration term.",
)
def head_entropy_nats(recent: Recent) -> Iterator[Finding | None]:
    """A head explores less than it should for the choices it has."""
    for head, rows in recent.heads.items():
        if not was_used(rows[-1]) or (head == "op" and is_sentinel(_idle_share(recent))):
            continue
        yield check_head_nats(head, rows[-1].entropy_nats, rows[-1].valid_actions)


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


def _idle_share(recent: Recent) -> float | None:
    return recent.rounds[-1].idle_share_free if recent.rounds else None
