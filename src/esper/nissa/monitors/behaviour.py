"""Monitors of what the controller does and sees, and of the scores over rounds and epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean

from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    measured,
    register_monitor,
    smoothed,
)
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateRow

FREE_STEPS = 100
OBS_CLAMP = Limits(warning=0.05, critical=0.10)
GROWTH = Limits(info=2.0, warning=5.0)
STILLBORN_SEEDS = 50
SHORTCUT = Limits(warning=0.3, critical=0.6)
SHORTCUT_UPDATES = 3
WASTED_ROUNDS = 10
WASTED_SEEDS = 100
WASTED_RATE = 0.05


_GROWN = "a network has {value:.2f} times the parameters of its host (limit {limit:g})"


@register_monitor(
    reads=RoundRow,
    thresholds="WAIT in 100 % of at least 100 free decisions: warning; 99 % is right",
    advice="Raise the op's entropy bonus, weaken the sentinel prior, or start on tasks where "
    "growth usually pays.",
)
def never_acts(recent: Recent) -> Iterator[Finding | None]:
    """The op head has collapsed to WAIT: the controller is a WAIT-only baseline."""
    newest = recent.rounds[-1]
    share, free = newest.wait_share_free, newest.free_steps
    if share is not None and share >= 1.0 and (free is None or free >= FREE_STEPS):
        message = "the controller waited in every decision in which it could have acted"
        yield Finding("warning", message, share, 1.0)


@register_monitor(
    reads=RoundRow,
    thresholds="> 5 % warning, > 10 % critical",
    advice="Look which features are at their clamp: a task with losses or gradients of another "
    "scale needs its own normaliser statistics.",
)
def observation_clamp(recent: Recent) -> Iterator[Finding | None]:
    """The observation saturates, so the controller cannot tell situations apart."""
    newest = recent.rounds[-1]
    message = "{value:.1%} of the observation lies at its clamp (limit {limit:.0%})"
    found = OBS_CLAMP.find(newest.obs_clamp_share, message)
    features = newest.obs_clamp_features
    if found is not None and isinstance(features, Mapping) and features:
        most = sorted(features.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {share:.0%}" for name, share in most)
        found = replace(found, message=f"{found.message}: {named}")
    yield found


@register_monitor(
    reads=UpdateRow,
    thresholds="op probability that moves without the last action's features: > 30 % warning, "
    "> 60 % critical, in 3 updates in a row",
    advice="Compare greedy returns with the feedback features zeroed; if nothing is lost without "
    "them, train without them.",
)
def shortcut_learning(recent: Recent) -> Iterator[Finding | None]:
    """The policy's choice depends on its last action instead of the network's state."""
    values = measured([row.feedback_dependence for row in recent.updates])[-SHORTCUT_UPDATES:]
    if len(values) == SHORTCUT_UPDATES:
        message = f"{values[-1]:.0%} of the op's probability hangs on the last action alone "
        found = SHORTCUT.find(min(values), message + "(limit {limit:.0%})")
        yield None if found is None else replace(found, value=values[-1])


@register_monitor(
    reads=RoundRow,
    thresholds="of at least 100 seeds germinated in the last 10 rounds < 5 % fossilized: warning",
    advice="Look at the fates by blueprint; a minimum prune age, a rarer PRUNE at the start, or "
    "easier gates let seeds live until they can be judged.",
)
def wasted_seeds(recent: Recent) -> Iterator[Finding | None]:
    """Seeds are started and thrown away: nothing is ever kept long enough to pay."""
    rows = list(recent.rounds)[-WASTED_ROUNDS:]
    begun = sum(row.seeds_germinated or 0 for row in rows)
    kept = sum(row.seeds_fossilized or 0 for row in rows)
    if begun >= WASTED_SEEDS and kept < WASTED_RATE * begun:
        message = f"only {kept} of the last {begun} seeds were fossilized"
        yield Finding("warning", message, kept / begun, WASTED_RATE)


@register_monitor(
    reads=RoundRow,
    thresholds="> 2 times the host info, > 5 times warning",
    advice="Raise the rent, or set max_parameters.",
)
def growth_of_rows(recent: Recent) -> Iterator[Finding | None]:
    """Some network grew far beyond its host."""
    yield GROWTH.find(recent.rounds[-1].growth_ratio, _GROWN)


@register_monitor(
    reads=EpochRow,
    thresholds="> 2 times the host info, > 5 times warning",
    advice="Set max_parameters or max_seeds if that is more than the task deserves.",
)
def growth(recent: Recent) -> Iterator[Finding | None]:
    """The network grew far beyond its host."""
    newest = recent.epochs[-1]
    if (recent.run.rows or 1) > 1 or not newest.host_parameters or newest.parameters is None:
        return
    if newest.training_flops is not None:
        return  # A deepened network grows to the size that its owner has built.
    yield GROWTH.find(newest.parameters / newest.host_parameters, _GROWN)


@register_monitor(
    reads=RoundRow,
    thresholds="at least 50 seeds of a blueprint and none fossilized: warning",
    advice="Run the blueprint's conformance battery: does every parameter get a gradient?",
)
def stillborn_blueprint(recent: Recent) -> Iterator[Finding]:
    """Seeds of this blueprint never help, or cannot learn."""
    fates = recent.rounds[-1].blueprint_fates
    for blueprint, counts in fates.items() if isinstance(fates, Mapping) else ():
        germinated = counts.get("germinated", 0)
        if germinated >= STILLBORN_SEEDS and not counts.get("fossilized", 0):
            message = f"none of {germinated} seeds of {blueprint} was ever fossilized"
            limit = float(STILLBORN_SEEDS)
            yield Finding("warning", message, float(germinated), limit, subject=blueprint)


_ROLLBACK = {
    "not_finite": "its loss was not finite",
    "lobotomy": "it fell back to chance",
    "divergence": "its loss exploded",
}


def _reason(rollback: str | None) -> str:
    return _ROLLBACK.get(rollback or "", rollback or "the reason was not recorded")


@register_monitor(
    reads=EpisodeRow,
    thresholds="every rollback: warning",
    advice="One is bad luck; many mean that blends are too sudden or the learning rate too high.",
    is_event=True,
)
def governor_rollback(recent: Recent) -> Iterator[Finding]:
    """The governor found a network beyond saving and took it back to its last good state."""
    newest = recent.episodes[-1]
    if newest.rolled_back:
        message = f"row {newest.row} was rolled back: {_reason(newest.rollback_reason)}"
        yield Finding("warning", message, subject=newest.rollback_reason)


@register_monitor(
    reads=EpochRow,
    thresholds="every rollback: warning",
    advice="One is bad luck; several mean that the learning rate is too high or blends too sudden.",
    is_event=True,
)
def rollback(recent: Recent) -> Iterator[Finding]:
    """The governor took the network back to its last good state."""
    newest = recent.epochs[-1]
    if newest.rollback_reason is not None:
        message = f"the network was rolled back: {_reason(newest.rollback_reason)}"
        yield Finding("warning", message, subject=newest.rollback_reason)


# ---- Trends over rounds, sudden changes between epochs


ROLLING = 10
DEGRADATION = 0.10
DEGRADATION_AFTER = 0.10
PLATEAU = 0.5
TREND = 2.0
LOSS_SPIKE = 2.0
SCORE_DROP = 5.0
TRACE_MEMORY = 0.9
TRACE_WARMUP = 3
TRACE_WINDOW = 32
"""Epochs that matter to an average with that memory."""


@register_monitor(
    reads=RoundRow,
    thresholds="a tenth below the mean of the last 10 rounds, after a tenth of the run: warning",
    advice="Go back to the best checkpoint; look for a KL spike or a collapse just before.",
)
def performance_degradation(recent: Recent) -> Iterator[Finding | None]:
    """The controller has become clearly worse than it was."""
    scores = measured([row.score_mean for row in recent.rounds])
    is_early = recent.progress is not None and recent.progress < DEGRADATION_AFTER
    if is_early or len(scores) <= ROLLING:
        return
    average = fmean(scores[-ROLLING - 1 : -1])
    limit = average - DEGRADATION * abs(average)
    if scores[-1] < limit:
        message = (
            f"the score {scores[-1]:.2f} is more than a tenth below the mean {average:.2f} "
            f"of the last {ROLLING} rounds"
        )
        yield Finding("warning", message, scores[-1], limit)


@register_monitor(
    reads=RoundRow,
    thresholds="change of the rolling score: < 0.5 points plateau (info), +2 improvement (info), "
    "-2 degradation (warning)",
    advice="On a plateau, look at exploration; after a degradation, at the last updates.",
)
def trend(recent: Recent) -> Iterator[Finding]:
    """The trend of the rolling score."""
    rolling = measured([row.score_rolling for row in recent.rounds])
    if len(rolling) <= ROLLING:
        return
    change = rolling[-1] - rolling[-2]
    message = f"the rolling score changed by {change:+.2f} points"
    if abs(change) < PLATEAU:
        yield Finding("info", f"plateau: {message}", change, PLATEAU, subject="plateau")
    elif change >= TREND:
        yield Finding("info", f"improvement: {message}", change, TREND, subject="improvement")
    elif change <= -TREND:
        yield Finding("warning", f"degradation: {message}", change, TREND, subject="degradation")


@register_monitor(
    reads=EpochRow,
    thresholds="validation loss > 2 times its average, score 5 points below the last: warning",
    advice="Look at the decision before it: a blend that is too fast, or a prune of a seed that "
    "was needed; a slower alpha schedule is smoother.",
)
def sudden_change(recent: Recent) -> Iterator[Finding | None]:
    """Something happened to the network in this epoch."""
    if (recent.run.rows or 1) > 1:
        return
    rows = list(recent.epochs)[-TRACE_WINDOW:]
    losses = measured([row.val_loss for row in rows])
    average = smoothed(losses[:-1], TRACE_MEMORY)
    if len(losses) > TRACE_WARMUP and average is not None and average > 0:
        limit = LOSS_SPIKE * average
        message = "loss spike: {value:.4g} (limit {limit:.4g})"
        yield Limits(warning=limit).find(losses[-1], message, subject="loss_spike")
    scores = measured([row.val_score for row in rows])
    if len(scores) > 1 and scores[-1] <= scores[-2] - SCORE_DROP:
        limit = scores[-2] - SCORE_DROP
        message = f"score drop: {scores[-1]:.4g} (limit {limit:.4g})"
        yield Finding("warning", message, scores[-1], limit, subject="score_drop")
