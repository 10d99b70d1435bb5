"""Monitors of the policy's steps: ratios, KL and stagnation, all measured after the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from esper.nissa.monitors.table import Finding, Recent, Series, findings, register_monitor
from esper.nissa.schema import UpdateHeadRow, UpdateRow

JOINT_RATIO_MAX = 5.0
JOINT_RATIO_MIN = 0.1
HEAD_RATIO_WARNING = 3.0
HEAD_RATIO_CRITICAL = 10.0
RATIO_UNCHANGED = (0.99, 1.01)
KL_WARNING = 0.1
KL_CRITICAL = 0.5
KL_STAGNANT = 1e-6
STAGNANT_UPDATES = 5


def check_joint_ratio(ratio_max: float | None, ratio_min: float | None) -> Iterator[Finding]:
    """Find joint ratios that exploded or collapsed."""
    if ratio_max is not None and ratio_max > JOINT_RATIO_MAX:
        yield Finding(
            severity="critical",
            subject="explosion",
            value=ratio_max,
            threshold=JOINT_RATIO_MAX,
            message=f"the joint ratio reached {ratio_max:.3g} (limit {JOINT_RATIO_MAX:g})",
        )
    if ratio_min is not None and ratio_min < JOINT_RATIO_MIN:
        yield Finding(
            severity="warning",
            subject="collapse",
            value=ratio_min,
            threshold=JOINT_RATIO_MIN,
            message=f"the joint ratio fell to {ratio_min:.3g} (limit {JOINT_RATIO_MIN:g})",
        )


def check_head_ratio(head: str, ratio_max: float | None) -> Finding | None:
    """Find a head whose own ratio is too large, however healthy the joint one looks."""
    if ratio_max is None or ratio_max <= HEAD_RATIO_WARNING:
        return None
    is_critical = ratio_max > HEAD_RATIO_CRITICAL
    limit = HEAD_RATIO_CRITICAL if is_critical else HEAD_RATIO_WARNING
    return Finding(
        severity="critical" if is_critical else "warning",
        subject=head,
        value=ratio_max,
        threshold=limit,
        message=f"the ratio of the head {head} reached {ratio_max:.3g} (limit {limit:g})",
    )


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
    if approx_kl is None or approx_kl <= KL_WARNING:
        return None
    is_critical = approx_kl > KL_CRITICAL
    limit = KL_CRITICAL if is_critical else KL_WARNING
    return Finding(
        severity="critical" if is_critical else "warning",
        value=approx_kl,
        threshold=limit,
        message=f"the KL of an update is {approx_kl:.3g} nats (limit {limit:g})",
    )


def check_stagnation(approx_kl: Series, clipfrac: Series, usable_steps: Series) -> Finding | None:
    """Find a policy that has stopped changing although it had decisions to learn from."""
    rows = list(zip(approx_kl, clipfrac, usable_steps, strict=True))[-STAGNANT_UPDATES:]
    if len(rows) < STAGNANT_UPDATES:
        return None
    for kl, clipped, usable in rows:
        if kl is None or abs(kl) >= KL_STAGNANT or (clipped or 0.0) > 0 or usable == 0:
            return None
    return Finding(
        severity="warning",
        value=rows[-1][0],
        threshold=KL_STAGNANT,
        message=f"the policy has not changed for {STAGNANT_UPDATES} updates (KL below "
        f"{KL_STAGNANT:g}, nothing clipped)",
    )


def was_used(row: UpdateHeadRow) -> bool:
    """Return whether a head had a choice to make; one that never had is healthy by definition."""
    had_steps = row.free_steps is None or row.free_steps > 0
    had_choice = row.valid_actions is None or row.valid_actions > 1
    return had_steps and had_choice and row.usage != 0


@register_monitor(
    "joint_ratio",
    reads=UpdateRow,
    thresholds="greatest > 5 critical; least < 0.1 warning",
    meaning="One update changed the probability of some action far beyond the clip range.",
    advice="Lower the learning rate or the epochs per update, or set a KL limit.",
)
def joint_ratio(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    newest = recent.updates[-1]
    yield from check_joint_ratio(newest.ratio_max, newest.ratio_min)


@register_monitor(
    "head_ratio",
    reads=UpdateRow,
    thresholds="greatest > 3 warning, > 10 critical; all of them within 0.99 to 1.01 info",
    meaning="One head moved too far while the joint ratio may look fine; or no head moved at all.",
    advice="Look at that head's advantages and gradient norm first; then lower the learning rate. "
    "If nothing moves, check that advantages are not zero and that gradients arrive.",
)
def head_ratio(recent: Recent) -> Iterator[Finding]:
    """Look at every head in the newest update."""
    newest = [rows[-1] for rows in recent.heads.values() if was_used(rows[-1])]
    for row in newest:
        yield from findings(check_head_ratio(row.head, row.ratio_max))
    if is_unchanged({row.head: (row.ratio_min, row.ratio_max) for row in newest}):
        yield Finding(
            severity="info",
            subject="all heads",
            threshold=RATIO_UNCHANGED[1],
            message="every head's ratio is within 0.99 to 1.01: the update changed nothing",
        )


@register_monitor(
    "kl_spike",
    reads=UpdateRow,
    thresholds="> 0.1 nats warning, > 0.5 critical",
    meaning="The policy moved so far in one update that the data it learned from is stale.",
    advice="Lower the learning rate, set or lower target_kl, use fewer epochs per update.",
)
def kl_spike(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    yield from findings(check_kl(recent.updates[-1].approx_kl))


@register_monitor(
    "policy_stagnation",
    reads=UpdateRow,
    thresholds="KL < 1e-6 and nothing clipped in 5 updates in a row that had free decisions",
    meaning="The policy has stopped learning; KL is measured after the step, so 0 is no artefact.",
    advice="Check conditional entropies: a collapsed head has no gradient left. Raise the "
    "exploration term, or reset the collapsed heads and resume.",
)
def policy_stagnation(recent: Recent) -> Iterator[Finding]:
    """Look at the last few updates."""
    rows = recent.updates
    yield from findings(
        check_stagnation(
            [row.approx_kl for row in rows],
            [row.clipfrac for row in rows],
            [row.usable_steps for row in rows],
        )
    )
