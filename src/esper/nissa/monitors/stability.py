"""Monitors of gradients, log-probabilities, the policy's LSTM state and GPU memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    Severity,
    measured,
    register_monitor,
    smoothed,
)
from esper.nissa.monitors.policy import was_used
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RoundRow, UpdateRow

GRADIENT_DRIFT = Limits(info=0.5)
GRADIENT_MEMORY = 0.99
GRADIENT_WARMUP = 10
GRADIENT_MIN = Limits(warning=1e-7, is_floor=True)
GRADIENT_MAX = Limits(critical=100.0)
LOG_PROB = Limits(warning=-50.0, critical=-100.0, is_floor=True)
SKIPPED_CRITICAL = 3
HEAD_GRADIENT_UPDATES = 3


@register_monitor(
    reads=UpdateRow,
    thresholds="|norm - average| > 0.5 of the average (memory 0.99, after 10 updates): info",
    advice="Look at what else changed at that round: rewards, returns, a head's entropy.",
)
def gradient_drift(recent: Recent) -> Iterator[Finding | None]:
    """The learner's gradients have changed their scale."""
    norms = measured([row.grad_norm for row in recent.updates])
    average = smoothed(norms[:-1], GRADIENT_MEMORY)
    if average and len(norms) > GRADIENT_WARMUP:
        message = f"the gradient norm {norms[-1]:.3g} is {{value:.0%}} away from its average "
        message += f"{average:.3g}"
        yield GRADIENT_DRIFT.find(abs(norms[-1] - average) / average, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="< 1e-7 warning; > 100 critical",
    advice="Vanished: check advantages and masks. Exploded: check value targets and rewards.",
)
def gradient_norm(recent: Recent) -> Iterator[Finding | None]:
    """Gradients have vanished or exploded."""
    norm, message = (
        recent.updates[-1].grad_norm,
        "the gradient norm is {value:.3g} (limit {limit:g})",
    )
    yield GRADIENT_MAX.find(norm, message) or GRADIENT_MIN.find(norm, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="a head that had a choice: < 1e-7 in 3 updates in a row warning; > 100 critical",
    advice="Vanished: look at its conditional entropy and at the masks. Exploded: look at its "
    "ratios; its learning rate can be lowered alone (`--set ppo.lr_multipliers`).",
)
def head_gradient(recent: Recent) -> Iterator[Finding | None]:
    """A head learns nothing although it had decisions to make, or its gradient explodes."""
    for head, rows in recent.heads.items():
        last = measured([row.grad_norm for row in rows if was_used(row)])[-HEAD_GRADIENT_UPDATES:]
        if not last:
            continue
        is_dead = len(last) == HEAD_GRADIENT_UPDATES and GRADIENT_MIN.find(max(last), "")
        lasting = f" in {HEAD_GRADIENT_UPDATES} updates in a row" if is_dead else ""
        message = f"the gradient norm of the head {head} is {{value:.3g}}{lasting}"
        limits = GRADIENT_MIN if is_dead else GRADIENT_MAX
        yield limits.find(last[-1], message + " (limit {limit:g})", subject=head)


@register_monitor(
    reads=UpdateRow,
    thresholds="any NaN or infinite value: critical",
    advice="Run the policy in FP32; find the head and kind in the events of that round.",
)
def numerical_instability(recent: Recent) -> Iterator[Finding]:
    """The learner met numbers that are not finite."""
    count = recent.updates[-1].nonfinite
    if count:
        message = f"{count} values in the update were NaN or infinite"
        yield Finding("critical", message, float(count), 0.0)


@register_monitor(
    reads=UpdateRow,
    thresholds="least < -50 warning, < -100 critical",
    advice="Score with the masks and the floor that were used for sampling.",
)
def log_prob(recent: Recent) -> Iterator[Finding | None]:
    """An action was taken that its policy thinks impossible: sampling and scoring differ."""
    message = "an action has the log-probability {value:.3g} (limit {limit:g})"
    yield LOG_PROB.find(recent.updates[-1].log_prob_min, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="1 warning; 3 in a row critical",
    advice="Resume from an earlier checkpoint with a lower learning rate.",
)
def skipped_updates(recent: Recent) -> Iterator[Finding | None]:
    """Updates were skipped because a log-probability or value was not finite."""
    count = len(list(takewhile(bool, (row.was_skipped for row in reversed(recent.updates)))))
    if count:
        message = f"{count} updates in a row were skipped because something was not finite"
        severity: Severity = "critical" if count >= SKIPPED_CRITICAL else "warning"
        yield Finding(severity, message, float(count), float(SKIPPED_CRITICAL))


# ------------------------------------------------------------------------------------------ memory

LSTM_RMS_MAX = Limits(warning=10.0)
LSTM_RMS_MIN = Limits(warning=1e-6, is_floor=True)
LSTM_DRIFT = Limits(warning=2.0)
_PARTS = {"h_rms": "hidden state", "c_rms": "cell state"}


@register_monitor(
    reads=UpdateRow,
    thresholds="root mean square > 10 or < 1e-6 warning; not finite critical",
    advice="Check the LayerNorm after the LSTM, the forget bias and the gradient clip.",
)
def lstm_rms(recent: Recent) -> Iterator[Finding | None]:
    """The policy's memory has saturated or died."""
    newest = recent.updates[-1]
    for part, rms in (("hidden state", newest.lstm_h_rms), ("cell state", newest.lstm_c_rms)):
        if rms is not None and not math.isfinite(rms):
            yield Finding("critical", f"the LSTM's {part} is not finite", rms, subject=part)
            continue
        message = f"the LSTM's {part} has a root mean square of {{value:.3g}} (limit {{limit:g}})"
        yield LSTM_RMS_MAX.find(rms, message, subject=part)
        yield LSTM_RMS_MIN.find(rms, message, subject=part)


@register_monitor(
    reads=UpdateRow,
    thresholds="cell state beyond epoch 100 more than 2 times that before: warning",
    advice="Shorten episodes, clamp the cell softly, or use a second recurrent layer.",
)
def lstm_drift(recent: Recent) -> Iterator[Finding | None]:
    """The memory keeps growing in long episodes and may forget their start."""
    early, late = recent.updates[-1].lstm_c_rms_early, recent.updates[-1].lstm_c_rms_late
    if early is not None and late is not None and early > 0:
        message = "the LSTM's cell state is {value:.3g} times as large beyond epoch 100"
        yield LSTM_DRIFT.find(late / early, message)


@register_monitor(
    reads=UpdateRow,
    thresholds="root mean square at the last measured step more than 2 times that half-way: "
    "warning",
    advice="Compare the steps in `updates.lstm_by_step`; clamp the cell softly or shorten "
    "episodes.",
)
def lstm_growth(recent: Recent) -> Iterator[Finding | None]:
    """The memory has not settled by the end of an episode, whatever its length."""
    steps = recent.updates[-1].lstm_by_step
    measured_steps = steps if isinstance(steps, list | tuple) else ()
    known = [one for one in measured_steps if one.get("step") is not None]
    # The state fills during the first steps, so only the second half of the episode counts.
    early = [one for one in known[:-1] if one["step"] <= known[-1]["step"] / 2]
    if not early:
        return
    half, last = max(early, key=lambda one: float(one["step"])), known[-1]
    for name, part in _PARTS.items():
        before, after = half.get(name), last.get(name)
        if before and after:
            message = f"the LSTM's {part} is {{value:.3g}} times as large at step {last['step']} "
            message += f"as at step {half['step']}"
            yield LSTM_DRIFT.find(after / before, message, subject=part)


MEMORY = Limits(info=0.85, warning=0.90)
COOLDOWN_S = 60.0


_OF_GPU: dict[str, Any] = {
    "thresholds": "> 85 % info, > 90 % warning; once a minute",
    "advice": "Use fewer rows, a smaller batch, or cap the parameters.",
    "is_event": True,
    "is_volatile": True,
}


@register_monitor(reads=EpochRow, **_OF_GPU)
def gpu_memory(recent: Recent) -> Iterator[Finding | None]:
    """The GPU's memory is running out."""
    yield from _memory(recent.epochs)


@register_monitor(reads=RoundRow, **_OF_GPU)
def gpu_memory_of_rounds(recent: Recent) -> Iterator[Finding | None]:
    """The GPU's memory is running out."""
    yield from _memory(recent.rounds)


def _memory(rows: Sequence[EpochRow] | Sequence[RoundRow]) -> Iterator[Finding | None]:
    if rows[-1].gpu_memory_share is None:
        return
    fired_at: float | None = None
    found = None
    for row in rows:
        now = row.time or 0.0
        found = None
        if fired_at is None or now - fired_at >= COOLDOWN_S:
            message = "{value:.0%} of the GPU's memory is in use"
            found = MEMORY.find(row.gpu_memory_share, message)
        if found is not None:
            fired_at = now
    yield found
