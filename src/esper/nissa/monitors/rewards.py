"""Monitors of rewards: is the controller paid for better networks, or for something else?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from esper.nissa.monitors.monitor import Finding, Recent, register_monitor
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RoundRow
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
"""Built-in terms that steer and do not pay for a better network; terms of others are not judged."""
GAIN_ROUNDS = 10
GAIN_SEEDS = 5
GAIN_EPISODES = 3
GAIN_ERRORS = 2.0
HINDSIGHT_ROUNDS = 10
HINDSIGHT_SEEDS = 50
HINDSIGHT_CAP = 0.2
HINDSIGHT_PAID = 10


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
def return_without_gain(recent: Recent) -> Iterator[Finding]:
    """The controller is paid although its networks are no better than if it had only waited."""
    played = [
        (one, float(one.episodic_return), float(one.gain))
        for one in recent.episodes
        if one.episodic_return is not None and one.gain is not None and math.isfinite(one.gain)
    ]
    if not played:
        return
    last = played[-1][0].round
    newest = [(paid, gain) for one, paid, gain in played if one.round == last]
    mean_paid = fmean(paid for paid, _ in newest)
    # Networks that all end exactly where their twins do are no chance, however few they are.
    if len(newest) >= GAIN_EPISODES and mean_paid > 0 and all(gain == 0 for _, gain in newest):
        message = (
            f"the mean return is {mean_paid:+.3g} although every network ended level with its twin"
        )
        yield Finding("warning", message, mean_paid, 0.0)
        return
    # Rows that share a seed share their twin and its luck: they count as one.
    seeds = grouped(
        ((one.round, one.task, one.env_seed), (paid, gain))
        for one, paid, gain in played
        if one.round > last - GAIN_ROUNDS
    ).values()
    returns, gains = ([fmean(pair[at] for pair in own) for own in seeds] for at in (0, 1))
    if len(returns) < GAIN_SEEDS or fmean(gains) > 0:
        return
    excess = [one - other for one, other in zip(returns, gains, strict=True)]
    if all(fmean(values) > GAIN_ERRORS * _error(values) for values in (returns, excess)):
        message = (
            f"the mean return is {fmean(returns):+.3g} although the mean gain over the twin is "
            f"{fmean(gains):+.3g} points ({len(returns)} seeds)"
        )
        yield Finding("warning", message, fmean(returns), GAIN_ERRORS * _error(returns))


@register_monitor(
    reads=RoundRow,
    thresholds="contribution >= 5 times the improvement with a penalty, or any ransomware seed: "
    "warning",
    advice="Compare with the twin: only the gain over it is real. Use the `twin` reward, or raise "
    "the anti-gaming penalties.",
)
def reward_hacking(recent: Recent) -> Iterator[Finding]:
    """Seeds are credited with more than the network gained: the reward is being gamed."""
    newest = recent.rounds[-1]
    ratio = newest.attribution_ratio_max
    if ratio is not None and ratio >= ATTRIBUTION_RATIO:
        message = f"a seed's contribution is {ratio:.3g} times what the network gained"
        yield Finding("warning", message, ratio, ATTRIBUTION_RATIO, subject="attribution")
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
    shaping, penalised = _terms(newest).get(SHAPING, {}).get("share"), newest.anti_gaming_share
    low, high = PBRS_SHARE
    # A share of 0 is a reward without shaping, which is fine.
    if shaping and not low <= shaping <= high:
        message = f"shaping is {shaping:.0%} of the reward (healthy: {low:.0%} to {high:.0%})"
        yield Finding("info", message, shaping, low if shaping < low else high, subject=SHAPING)
    if penalised is not None and penalised >= ANTI_GAMING_SHARE:
        message = f"{penalised:.0%} of decisions were penalised for gaming"
        subject = "anti_gaming_share"
        yield Finding("warning", message, penalised, ANTI_GAMING_SHARE, subject=subject)


@register_monitor(
    reads=RoundRow,
    thresholds="a built-in term that only steers (not gain, attribution, terminal, escrow) > 50 % "
    "of the absolute reward: info",
    advice="Scale that term down, or leave it out: compare with the `twin` reward.",
)
def reward_terms(recent: Recent) -> Iterator[Finding]:
    """Steering terms outweigh the terms that pay for a better network."""
    for term, numbers in _terms(recent.rounds[-1]).items():
        share = numbers.get("share")
        if term in STEERING and share is not None and share > TERM_SHARE:
            message = f"{share:.0%} of all that is paid is {term}, not what the network became"
            yield Finding("info", message, share, TERM_SHARE, subject=term)


@register_monitor(
    reads=RoundRow,
    thresholds="none paid in 10 rounds with at least 50 seeds fossilized info; median at the cap "
    "of 0.2 over at least 10 payments info",
    advice="Never there: look whether seeds ever live side by side. At the cap: lower its weight.",
)
def hindsight_credit(recent: Recent) -> Iterator[Finding]:
    """Credit for scaffolds carries no information: it is never there, or always the same."""
    last = list(recent.rounds)[-HINDSIGHT_ROUNDS:]
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


@register_monitor(
    reads=EpochRow,
    thresholds="contribution > 0.1 and improvement < -0.2 points warning; contribution >= 1 "
    "critical",
    advice="Compare with the twin. If it is ahead, run again with another controller; in your own "
    "loop, prune the seed slowly, so that the host can take its part back.",
)
def ransomware(recent: Recent) -> Iterator[Finding]:
    """The host has come to depend on a seed that made the network worse."""
    for slot, stage in recent.stages.items():
        worth, change = stage.contribution, stage.improvement
        if worth is None or change is None or change >= RANSOM_IMPROVEMENT:
            continue
        message = (
            f"without the seed in {slot} the score would fall by {worth:.2f} points, yet it has "
            f"changed by {change:+.2f} since its stage began: the network depends on it"
        )
        if worth >= RANSOM_CRITICAL:
            yield Finding("critical", message, worth, RANSOM_CONTRIBUTION, subject=slot)
        elif worth > RANSOM_CONTRIBUTION:
            yield Finding("warning", message, worth, RANSOM_CONTRIBUTION, subject=slot)


def _terms(row: RoundRow) -> Mapping[str, Any]:
    return row.reward_terms if isinstance(row.reward_terms, Mapping) else {}
