"""Monitors of rewards: is the controller paid for growing networks, or for something else?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from esper.nissa.monitors.monitor import Finding, Recent, register_monitor
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow
from esper.utils.process import grouped

ATTRIBUTION_RATIO = 5.0
RANSOM_CONTRIBUTION = 0.1
RANSOM_IMPROVEMENT = -0.2
RANSOM_CRITICAL = 1.0
PBRS_SHARE = (0.10, 0.40)
ANTI_GAMING_SHARE = 0.05
TERM_SHARE = 0.5
SHAPING = "pbrs"
"""The term that shapes by potentials."""
STEERING = frozenset(
    {
        *("blending", "holding", SHAPING, "synergy", "rent", "shock", "occupancy"),
        *("first_germination", "action", "clawback", "auto_prune", "hindsight", "rollback"),
    }
)
"""Our terms that steer and do not pay for what a network became; others' are theirs to judge."""
GAIN_ROUNDS = 10
GAIN_SEEDS = 5
GAIN_EPISODES = 3
GAIN_ERRORS = 2.0
HINDSIGHT_ROUNDS = 10
HINDSIGHT_SEEDS = 50
HINDSIGHT_CAP = 0.2
HINDSIGHT_PAID = 10


def check_attribution(ratio: float | None) -> Finding | None:
    """Find a seed credited with far more than the network gained, where a penalty applied."""
    if ratio is None or ratio < ATTRIBUTION_RATIO:
        return None
    message = f"a seed's contribution is {ratio:.3g} times what the network gained"
    return Finding("warning", message, ratio, ATTRIBUTION_RATIO, subject="attribution")


def check_ransomware(
    slot: str, contribution: float | None, improvement: float | None
) -> Finding | None:
    """Find a seed the network cannot do without although it has become worse with it."""
    if contribution is None or improvement is None:
        return None
    if contribution <= RANSOM_CONTRIBUTION or improvement >= RANSOM_IMPROVEMENT:
        return None
    message = (
        f"the seed in {slot} holds {contribution:+.2f} points hostage: without it the "
        f"network would be worse, yet with it it changed by {improvement:+.2f}"
    )
    return Finding(
        "critical" if contribution >= RANSOM_CRITICAL else "warning",
        message,
        contribution,
        RANSOM_CONTRIBUTION,
        subject=slot,
    )


def check_shares(shaping: float | None, anti_gaming_share: float | None) -> Iterator[Finding]:
    """Find rewards that are mostly shaping, or often a penalty for gaming.

    A share of exactly 0 says that the reward has no shaping, which is no fault.
    """
    low, high = PBRS_SHARE
    if shaping and not low <= shaping <= high:
        limit = low if shaping < low else high
        message = f"shaping is {shaping:.0%} of the reward (healthy: {low:.0%} to {high:.0%})"
        yield Finding("info", message, shaping, limit, subject=SHAPING)
    if anti_gaming_share is not None and anti_gaming_share >= ANTI_GAMING_SHARE:
        message = f"{anti_gaming_share:.0%} of decisions were penalised for gaming"
        yield Finding(
            "warning", message, anti_gaming_share, ANTI_GAMING_SHARE, subject="anti_gaming_share"
        )


def check_terms(terms: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find a term that only steers and yet makes up most of what is paid."""
    for term, numbers in terms.items():
        share = numbers.get("share")
        if term not in STEERING or share is None or share <= TERM_SHARE:
            continue
        message = f"{share:.0%} of all that is paid is {term}, not what the network became"
        yield Finding("info", message, share, TERM_SHARE, subject=term)


def check_hindsight(rounds: Sequence[RoundRow]) -> Iterator[Finding]:
    """Find scaffolds that are never credited, or credit that always stands at its cap."""
    last = list(rounds)[-HINDSIGHT_ROUNDS:]
    paid = [row.hindsight_count for row in last if row.hindsight_count is not None]
    kept = sum(row.seeds_fossilized or 0 for row in last)
    if len(paid) == HINDSIGHT_ROUNDS and not sum(paid) and kept >= HINDSIGHT_SEEDS:
        message = (
            f"{kept} seeds were fossilized in {HINDSIGHT_ROUNDS} rounds and no scaffold "
            "was credited with any"
        )
        yield Finding("info", message, float(kept), float(HINDSIGHT_SEEDS), subject="never paid")
    newest = last[-1]
    quantiles = newest.hindsight_quantiles
    median = quantiles.get("p50") if isinstance(quantiles, Mapping) else None
    is_often = (newest.hindsight_count or 0) >= HINDSIGHT_PAID
    if is_often and median is not None and median >= 0.99 * HINDSIGHT_CAP:
        message = f"the median hindsight credit stands at its cap of {HINDSIGHT_CAP:g}"
        yield Finding("info", message, median, HINDSIGHT_CAP, subject="at the cap")


def check_return_without_gain(episodes: Sequence[EpisodeRow]) -> Finding | None:
    """Find rewards for networks that are no better than their waiting twins.

    Rows that share a seed share their twin and its luck: they count as one. A round in which every
    network ended exactly where its twin did is no matter of luck, however few they are.
    """
    played = [
        (one, float(one.episodic_return), float(one.gain))
        for one in episodes
        if one.episodic_return is not None and one.gain is not None and math.isfinite(one.gain)
    ]
    if not played:
        return None
    last = played[-1][0].round
    newest = [(paid, gain) for one, paid, gain in played if one.round == last]
    mean_paid = fmean(paid for paid, _ in newest)
    if len(newest) >= GAIN_EPISODES and mean_paid > 0 and all(gain == 0 for _, gain in newest):
        message = (
            f"the mean return is {mean_paid:+.3g} although every network ended level with its twin"
        )
        return Finding("warning", message, mean_paid, 0.0)
    seeds = grouped(
        ((one.round, one.task, one.env_seed), (paid, gain))
        for one, paid, gain in played
        if one.round > last - GAIN_ROUNDS
    ).values()
    returns, gains = ([fmean(pair[at] for pair in own) for own in seeds] for at in (0, 1))
    if len(returns) < GAIN_SEEDS or fmean(gains) > 0:
        return None
    excess = [one - other for one, other in zip(returns, gains, strict=True)]
    if not all(fmean(values) > GAIN_ERRORS * _error(values) for values in (returns, excess)):
        return None
    message = (
        f"the mean return is {fmean(returns):+.3g} although the mean gain over the twin is "
        f"{fmean(gains):+.3g} points ({len(returns)} seeds)"
    )
    return Finding("warning", message, fmean(returns), GAIN_ERRORS * _error(returns))


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / math.sqrt(len(values))


@register_monitor(
    reads=RoundRow,
    thresholds="mean return > 0 where every network of a round (at least 3) ended level with its "
    "twin: warning; mean gain <= 0 and both the return and its excess over the gain above 0 by 2 "
    "standard errors, over at least 5 seeds of the last 10 rounds: warning",
    advice="Judge the run by its gain. Look which term pays, and whether "
    "`--set reward.twin.own_share=1` pays the same.",
)
def return_without_gain(recent: Recent) -> Iterator[Finding | None]:
    """The controller is paid although its networks are no better than if it had only waited."""
    yield check_return_without_gain(recent.episodes)


@register_monitor(
    reads=RoundRow,
    thresholds="contribution >= 5 times the improvement with a penalty, or any ransomware seed: "
    "warning",
    advice="Compare with the twin: only the gain over it is real. Use the `twin` reward, or raise "
    "the anti-gaming penalties.",
)
def reward_hacking(recent: Recent) -> Iterator[Finding | None]:
    """Seeds are credited with more than the network gained: the reward is being gamed."""
    newest = recent.rounds[-1]
    yield check_attribution(newest.attribution_ratio_max)
    if newest.ransomware_count:
        message = f"{newest.ransomware_count} seeds contribute although the network got worse"
        yield Finding("warning", message, float(newest.ransomware_count), 0.0, subject="ransomware")


@register_monitor(
    reads=RoundRow,
    thresholds="shaping outside 10 to 40 % info; anti-gaming penalties in >= 5 % warning",
    advice="Scale the shaping; look at which penalty is paid, and for what.",
)
def reward_shares(recent: Recent) -> Iterator[Finding]:
    """The balance of the reward's terms is off."""
    newest = recent.rounds[-1]
    shaping = _terms(newest).get(SHAPING, {}).get("share")
    yield from check_shares(shaping, newest.anti_gaming_share)


@register_monitor(
    reads=RoundRow,
    thresholds="a built-in term that only steers (not gain, attribution, terminal, escrow) > 50 % "
    "of the absolute reward: info",
    advice="Scale that term down, or leave it out: compare with the `twin` reward.",
)
def reward_terms(recent: Recent) -> Iterator[Finding]:
    """The controller is paid for the way, not for where it leads."""
    yield from check_terms(_terms(recent.rounds[-1]))


@register_monitor(
    reads=RoundRow,
    thresholds="none paid in 10 rounds with at least 50 seeds fossilized info; median at the cap "
    "of 0.2 over at least 10 payments info",
    advice="Never there: look whether seeds ever live side by side. At the cap: lower its weight.",
)
def hindsight_credit(recent: Recent) -> Iterator[Finding]:
    """Credit for scaffolds carries no information: it is never there, or always the same."""
    yield from check_hindsight(recent.rounds)


@register_monitor(
    reads=EpochRow,
    thresholds="contribution > 0.1 and improvement < -0.2 points warning; contribution >= 1 "
    "critical",
    advice="Prune it slowly, so that the host can take its part back, and look at the twin.",
)
def ransomware(recent: Recent) -> Iterator[Finding | None]:
    """The host has come to depend on a seed that made the network worse."""
    for slot, stage in recent.stages.items():
        yield check_ransomware(slot, stage.contribution, stage.improvement)


def _terms(row: RoundRow) -> Mapping[str, Any]:
    return row.reward_terms if isinstance(row.reward_terms, Mapping) else {}
