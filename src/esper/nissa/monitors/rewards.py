"""Monitors of rewards: is the controller paid for growing networks, or for something else?"""

from __future__ import annotations

from collections.abc import Iterator

from esper.nissa.monitors.recent import Recent
from esper.nissa.monitors.table import Finding, register_monitor
from esper.nissa.schema import EpochRow, RoundRow

ATTRIBUTION_RATIO = 5.0
RANSOM_CONTRIBUTION = 0.1
RANSOM_IMPROVEMENT = -0.2
RANSOM_CRITICAL = 1.0
PBRS_SHARE = (0.10, 0.40)
ANTI_GAMING_SHARE = 0.05


def check_attribution(ratio: float | None, penalty: float | None = None) -> Finding | None:
    """Find a seed credited with far more than the network gained, where a penalty applied."""
    if ratio is None or ratio < ATTRIBUTION_RATIO or penalty == 0:
        return None
    return Finding(
        severity="warning",
        subject="attribution",
        value=ratio,
        threshold=ATTRIBUTION_RATIO,
        message=f"a seed's contribution is {ratio:.3g} times what the network gained",
    )


def check_ransomware(
    slot: str, contribution: float | None, improvement: float | None
) -> Finding | None:
    """Find a seed the network cannot do without although it has become worse with it."""
    if contribution is None or improvement is None:
        return None
    if contribution <= RANSOM_CONTRIBUTION or improvement >= RANSOM_IMPROVEMENT:
        return None
    return Finding(
        severity="critical" if contribution >= RANSOM_CRITICAL else "warning",
        subject=slot,
        value=contribution,
        threshold=RANSOM_CONTRIBUTION,
        message=f"the seed in {slot} holds {contribution:+.2f} points hostage: without it the "
        f"network would be worse, yet with it it changed by {improvement:+.2f}",
    )


def check_shares(pbrs_share: float | None, anti_gaming_share: float | None) -> Iterator[Finding]:
    """Find rewards that are mostly shaping, or often a penalty for gaming."""
    low, high = PBRS_SHARE
    if pbrs_share is not None and not low <= pbrs_share <= high:
        limit = low if pbrs_share < low else high
        yield Finding(
            severity="info",
            subject="pbrs_share",
            value=pbrs_share,
            threshold=limit,
            message=f"shaping is {pbrs_share:.0%} of the reward (healthy: {low:.0%} to {high:.0%})",
        )
    if anti_gaming_share is not None and anti_gaming_share >= ANTI_GAMING_SHARE:
        yield Finding(
            severity="warning",
            subject="anti_gaming_share",
            value=anti_gaming_share,
            threshold=ANTI_GAMING_SHARE,
            message=f"{anti_gaming_share:.0%} of decisions were penalised for gaming",
        )


@register_monitor(
    "reward_hacking",
    reads=RoundRow,
    thresholds="contribution >= 5 times the improvement with a penalty, or any ransomware seed: "
    "warning",
    meaning="Seeds are credited with more than the network gained: the reward is being gamed.",
    advice="Compare with the twin: only the gain over it is real. Use the `twin` reward, or raise "
    "the anti-gaming penalties.",
)
def reward_hacking(recent: Recent) -> Iterator[Finding]:
    """Look at the newest round."""
    newest = recent.rounds[-1]
    found = check_attribution(newest.attribution_ratio_max)
    if found is not None:
        yield found
    if newest.ransomware_count:
        yield Finding(
            severity="warning",
            subject="ransomware",
            value=float(newest.ransomware_count),
            threshold=0.0,
            message=f"{newest.ransomware_count} seeds contribute although the network got worse",
        )


@register_monitor(
    "reward_shares",
    reads=RoundRow,
    thresholds="shaping outside 10 to 40 % info; anti-gaming penalties in >= 5 % warning",
    meaning="The balance of the reward's terms is off.",
    advice="Scale the shaping; look at which penalty is paid, and for what.",
)
def reward_shares(recent: Recent) -> Iterator[Finding]:
    """Look at the newest round."""
    newest = recent.rounds[-1]
    yield from check_shares(newest.pbrs_share, newest.anti_gaming_share)


@register_monitor(
    "ransomware",
    reads=EpochRow,
    thresholds="contribution > 0.1 and improvement < -0.2 points warning; contribution >= 1 "
    "critical",
    meaning="The host has come to depend on a seed that made the network worse.",
    advice="Prune it slowly, so that the host can take its part back, and look at the twin.",
)
def ransomware(recent: Recent) -> Iterator[Finding]:
    """Look at the seeds of one network."""
    for slot, stage in recent.stages.items():
        found = check_ransomware(slot, stage.contribution, stage.improvement)
        if found is not None:
            yield found
