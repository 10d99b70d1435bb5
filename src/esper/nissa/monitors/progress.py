"""Monitors of how a run is getting on: trends over rounds, sudden changes between epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from esper.nissa.monitors.monitor import (
    Finding,
    Recent,
    Series,
    mean,
    measured,
    register_monitor,
    smoothed,
)
from esper.nissa.schema import EpochRow, RoundRow

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
