"""Monitors of what the controller does and sees: waiting, growth, seeds, observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    Series,
    mean,
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


def check_wait_share(share: float | None, free_steps: int | None) -> Finding | None:
    """Find a controller that never acts where it could. A high share alone is right."""
    if share is None or share < 1.0 or (free_steps is not None and free_steps < FREE_STEPS):
        return None
    message = "the controller waited in every decision in which it could have acted"
    return Finding("warning", message, share, 1.0)


def check_obs_clamp(
    share: float | None, features: Mapping[str, float] | None = None
) -> Finding | None:
    """Find observations of which too much lies at its clamp; name the features that do most."""
    found = OBS_CLAMP.find(
        share, "{value:.1%} of the observation lies at its clamp (limit {limit:.0%})"
    )
    if found is None or not features:
        return found
    most = sorted(features.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {share:.0%}" for name, share in most)
    return replace(found, message=f"{found.message}: {named}")


def check_shortcut(dependence: Series) -> Finding | None:
    """Find a policy that decides by its own last action more than by what it sees.

    `dependence` is how much of the op's probability moves when the features of the last action
    are hidden, update by update.
    """
    values = measured(dependence)[-SHORTCUT_UPDATES:]
    if len(values) < SHORTCUT_UPDATES:
        return None
    message = f"{values[-1]:.0%} of the op's probability hangs on the last action alone "
    found = SHORTCUT.find(min(values), message + "(limit {limit:.0%})")
    return None if found is None else replace(found, value=values[-1])


def check_wasted(
    germinated: Sequence[int | None], fossilized: Sequence[int | None]
) -> Finding | None:
    """Find a controller that germinates much and keeps next to nothing, over the last rounds."""
    begun = sum(one or 0 for one in germinated[-WASTED_ROUNDS:])
    kept = sum(one or 0 for one in fossilized[-WASTED_ROUNDS:])
    if begun < WASTED_SEEDS or kept >= WASTED_RATE * begun:
        return None
    message = f"only {kept} of the last {begun} seeds were fossilized"
    return Finding("warning", message, kept / begun, WASTED_RATE)


def check_growth(ratio: float | None) -> Finding | None:
    """Find a network that has grown out of proportion."""
    return GROWTH.find(
        ratio, "a network has {value:.2f} times the parameters of its host (limit {limit:g})"
    )


def find_stillborn(fates: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Find blueprints that were tried often and never once kept."""
    for blueprint, counts in fates.items():
        germinated, fossilized = counts.get("germinated", 0), counts.get("fossilized", 0)
        if germinated >= STILLBORN_SEEDS and fossilized == 0:
            message = f"none of {germinated} seeds of {blueprint} was ever fossilized"
            yield Finding(
                "warning", message, float(germinated), float(STILLBORN_SEEDS), subject=blueprint
            )


@register_monitor(
    reads=RoundRow,
    thresholds="WAIT in 100 % of at least 100 free decisions: warning; 99 % is right",
    advice="Raise the op's entropy bonus, weaken the sentinel prior, or start on tasks where "
    "growth usually pays.",
)
def never_acts(recent: Recent) -> Iterator[Finding | None]:
    """The op head has collapsed to WAIT: the controller is a WAIT-only baseline."""
    newest = recent.rounds[-1]
    yield check_wait_share(newest.wait_share_free, newest.free_steps)


@register_monitor(
    reads=RoundRow,
    thresholds="> 5 % warning, > 10 % critical",
    advice="Look which features are at their clamp: a task with losses or gradients of another "
    "scale needs its own normaliser statistics.",
)
def observation_clamp(recent: Recent) -> Iterator[Finding | None]:
    """The observation saturates, so the controller cannot tell situations apart."""
    newest = recent.rounds[-1]
    features = newest.obs_clamp_features
    yield check_obs_clamp(
        newest.obs_clamp_share, features if isinstance(features, Mapping) else None
    )


@register_monitor(
    reads=UpdateRow,
    thresholds="op probability that moves without the last action's features: > 30 % warning, "
    "> 60 % critical, in 3 updates in a row",
    advice="Compare greedy returns with the feedback features zeroed; if nothing is lost without "
    "them, train without them.",
)
def shortcut_learning(recent: Recent) -> Iterator[Finding | None]:
    """The policy reads off what it did last instead of looking at the network."""
    yield check_shortcut([row.feedback_dependence for row in recent.updates])


@register_monitor(
    reads=RoundRow,
    thresholds="of at least 100 seeds germinated in the last 10 rounds < 5 % fossilized: warning",
    advice="Look at the fates by blueprint; a minimum prune age, a rarer PRUNE at the start, or "
    "easier gates let seeds live until they can be judged.",
)
def wasted_seeds(recent: Recent) -> Iterator[Finding | None]:
    """Seeds are started and thrown away: nothing is ever kept long enough to pay."""
    yield check_wasted(
        [row.seeds_germinated for row in recent.rounds],
        [row.seeds_fossilized for row in recent.rounds],
    )


@register_monitor(
    reads=RoundRow,
    thresholds="> 2 times the host info, > 5 times warning",
    advice="Raise the rent, or set max_parameters.",
)
def growth_of_rows(recent: Recent) -> Iterator[Finding | None]:
    """Some network grew far beyond its host."""
    yield check_growth(recent.rounds[-1].growth_ratio)


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
        return  # It is deepened, and grows into the network that its owner has built.
    yield check_growth(newest.parameters / newest.host_parameters)


@register_monitor(
    reads=RoundRow,
    thresholds="at least 50 seeds of a blueprint and none fossilized: warning",
    advice="Run the blueprint's conformance battery: does every parameter get a gradient?",
)
def stillborn_blueprint(recent: Recent) -> Iterator[Finding]:
    """Seeds of this blueprint never help, or cannot learn."""
    fates = recent.rounds[-1].blueprint_fates
    if isinstance(fates, Mapping):
        yield from find_stillborn(fates)


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


# ---- Monitors of how a run is getting on: trends over rounds, sudden changes between epochs


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

Trend = Literal["plateau", "improvement", "degradation"]


def check_degradation(scores: Series, progress: float | None) -> Finding | None:
    """Find a score a tenth below its rolling mean, once a tenth of the run is over."""
    values = measured(scores)
    if progress is not None and progress < DEGRADATION_AFTER:
        return None
    if len(values) <= ROLLING:
        return None
    average = mean(values[-ROLLING - 1 : -1])
    assert average is not None
    limit = average - DEGRADATION * abs(average)
    if values[-1] >= limit:
        return None
    message = (
        f"the score {values[-1]:.2f} is more than a tenth below the mean {average:.2f} "
        f"of the last {ROLLING} rounds"
    )
    return Finding("warning", message, values[-1], limit)


def find_trend(rolling: Series) -> tuple[Trend, float] | None:
    """Return what the newest change of a rolling mean amounts to, and the change in points."""
    values = measured(rolling)
    if len(values) <= ROLLING:
        return None
    change = values[-1] - values[-2]
    if abs(change) < PLATEAU:
        return "plateau", change
    if change >= TREND:
        return "improvement", change
    return ("degradation", change) if change <= -TREND else None


def trace_reasons(losses: Series, scores: Series) -> dict[str, tuple[float, float]]:
    """Return why the newest epoch deserves a close look, as {reason: (value, threshold)}.

    A loss twice its average, or a score five points below the one before. A failed gate and a
    change of stage are the other two reasons to look closely; those are rows of their own.
    """
    reasons: dict[str, tuple[float, float]] = {}
    values = measured(losses)
    average = smoothed(values[:-1], TRACE_MEMORY)
    if len(values) > TRACE_WARMUP and average and values[-1] > LOSS_SPIKE * average > 0:
        reasons["loss_spike"] = (values[-1], LOSS_SPIKE * average)
    points = measured(scores)
    if len(points) > 1 and points[-1] <= points[-2] - SCORE_DROP:
        reasons["score_drop"] = (points[-1], points[-2] - SCORE_DROP)
    return reasons


@register_monitor(
    reads=RoundRow,
    thresholds="a tenth below the mean of the last 10 rounds, after a tenth of the run: warning",
    advice="Go back to the best checkpoint; look for a KL spike or a collapse just before.",
)
def performance_degradation(recent: Recent) -> Iterator[Finding | None]:
    """The controller has become clearly worse than it was."""
    yield check_degradation([row.score_mean for row in recent.rounds], recent.progress)


@register_monitor(
    reads=RoundRow,
    thresholds="change of the rolling score: < 0.5 points plateau (info), +2 improvement (info), "
    "-2 degradation (warning)",
    advice="On a plateau, look at exploration; after a degradation, at the last updates.",
)
def trend(recent: Recent) -> Iterator[Finding]:
    """Which way the rolling score is going."""
    found = find_trend([row.score_rolling for row in recent.rounds])
    if found is not None:
        kind, change = found
        message = f"{kind}: the rolling score changed by {change:+.2f} points"
        yield Finding(
            "warning" if kind == "degradation" else "info",
            message,
            change,
            PLATEAU if kind == "plateau" else TREND,
            subject=kind,
        )


@register_monitor(
    reads=EpochRow,
    thresholds="validation loss > 2 times its average, score 5 points below the last: warning",
    advice="Look at the decision before it: a blend that is too fast, or a prune of a seed that "
    "was needed; a slower alpha schedule is smoother.",
)
def sudden_change(recent: Recent) -> Iterator[Finding]:
    """Something happened to the network in this epoch."""
    if (recent.run.rows or 1) > 1:
        return
    rows = list(recent.epochs)[-TRACE_WINDOW:]
    reasons = trace_reasons([row.val_loss for row in rows], [row.val_score for row in rows])
    for reason, (value, threshold) in reasons.items():
        message = f"{reason.replace('_', ' ')}: {value:.4g} (limit {threshold:.4g})"
        yield Finding("warning", message, value, threshold, subject=reason)
