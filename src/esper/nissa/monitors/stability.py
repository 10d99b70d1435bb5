"""Monitors of what must stay in range: gradients, log-probabilities, memory.

The memory is the policy's own (its LSTM), and the GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from esper.nissa.monitors.monitor import (
    Finding,
    Limits,
    Recent,
    Series,
    findings,
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


def check_gradient_drift(grad_norms: Series) -> Finding | None:
    """Find a gradient norm far from its moving average."""
    values = measured(grad_norms)
    if len(values) <= GRADIENT_WARMUP:
        return None
    average = smoothed(values[:-1], GRADIENT_MEMORY)
    if not average:
        return None
    message = f"the gradient norm {values[-1]:.3g} is {{value:.0%}} away from its average "
    message += f"{average:.3g}"
    return GRADIENT_DRIFT.find(abs(values[-1] - average) / average, message)


def check_gradient_norm(grad_norm: float | None) -> Finding | None:
    """Find a gradient that has vanished or exploded."""
    message = "the gradient norm is {value:.3g} (limit {limit:g})"
    return GRADIENT_MAX.find(grad_norm, message) or GRADIENT_MIN.find(grad_norm, message)


def check_head_gradient(head: str, grad_norms: Series) -> Finding | None:
    """Find a head that has had a choice and no gradient for several updates, or far too much.

    A norm that is None says that the head had no choice; it neither counts nor breaks a row.
    """
    values = measured(grad_norms)
    if not values:
        return None
    last = values[-HEAD_GRADIENT_UPDATES:]
    is_dead = len(last) == HEAD_GRADIENT_UPDATES and GRADIENT_MIN.find(max(last), "") is not None
    told = f" in {HEAD_GRADIENT_UPDATES} updates in a row" if is_dead else ""
    message = f"the gradient norm of the head {head} is {{value:.3g}}{told} (limit {{limit:g}})"
    return (GRADIENT_MIN if is_dead else GRADIENT_MAX).find(last[-1], message, subject=head)


def check_log_prob(log_prob_min: float | None) -> Finding | None:
    """Find actions that were all but impossible under the policy that took them."""
    message = "an action has the log-probability {value:.3g} (limit {limit:g})"
    return LOG_PROB.find(log_prob_min, message)


def check_skipped(was_skipped: Sequence[bool | None]) -> Finding | None:
    """Find updates that were skipped because something was not finite."""
    count = len(list(takewhile(bool, reversed(was_skipped))))
    if not count:
        return None
    message = f"{count} updates in a row were skipped because something was not finite"
    return Finding(
        "critical" if count >= SKIPPED_CRITICAL else "warning",
        message,
        float(count),
        float(SKIPPED_CRITICAL),
    )


@register_monitor(
    reads=UpdateRow,
    thresholds="|norm - average| > 0.5 of the average (memory 0.99, after 10 updates): info",
    advice="Look at what else changed at that round: rewards, returns, a head's entropy.",
)
def gradient_drift(recent: Recent) -> Iterator[Finding | None]:
    """The learner's gradients have changed their scale."""
    yield check_gradient_drift([row.grad_norm for row in recent.updates])


@register_monitor(
    reads=UpdateRow,
    thresholds="< 1e-7 warning; > 100 critical",
    advice="Vanished: check advantages and masks. Exploded: check value targets and rewards.",
)
def gradient_norm(recent: Recent) -> Iterator[Finding | None]:
    """Gradients have vanished or exploded."""
    yield check_gradient_norm(recent.updates[-1].grad_norm)


@register_monitor(
    reads=UpdateRow,
    thresholds="a head that had a choice: < 1e-7 in 3 updates in a row warning; > 100 critical",
    advice="Vanished: look at its conditional entropy and at the masks. Exploded: look at its "
    "ratios; its learning rate can be lowered alone (`--set ppo.lr_multipliers`).",
)
def head_gradient(recent: Recent) -> Iterator[Finding | None]:
    """A head learns nothing although it had decisions to make, or its gradient explodes."""
    for head, rows in recent.heads.items():
        yield check_head_gradient(head, [row.grad_norm if was_used(row) else None for row in rows])


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
    yield check_log_prob(recent.updates[-1].log_prob_min)


@register_monitor(
    reads=UpdateRow,
    thresholds="1 warning; 3 in a row critical",
    advice="Resume from an earlier checkpoint with a lower learning rate.",
)
def skipped_updates(recent: Recent) -> Iterator[Finding | None]:
    """Updates were skipped because a log-probability or value was not finite."""
    yield check_skipped([row.was_skipped for row in recent.updates])


# ------------------------------------------------------------------------------------------ memory

LSTM_RMS_MAX = Limits(warning=10.0)
LSTM_RMS_MIN = Limits(warning=1e-6, is_floor=True)
LSTM_DRIFT = Limits(warning=2.0)
_PARTS = {"h_rms": "hidden state", "c_rms": "cell state"}


def check_lstm_rms(subject: str, rms: float | None) -> Finding | None:
    """Find a memory that has exploded, died or is not finite."""
    if rms is None:
        return None
    if not math.isfinite(rms):
        return Finding("critical", f"the LSTM's {subject} is not finite", rms, subject=subject)
    message = f"the LSTM's {subject} has a root mean square of {{value:.3g}} (limit {{limit:g}})"
    grown = LSTM_RMS_MAX.find(rms, message, subject=subject)
    return grown or LSTM_RMS_MIN.find(rms, message, subject=subject)


def check_lstm_drift(early: float | None, late: float | None) -> Finding | None:
    """Find a memory that keeps growing late in long episodes."""
    if early is None or late is None or early <= 0:
        return None
    message = "the LSTM's cell state is {value:.3g} times as large beyond epoch 100"
    return LSTM_DRIFT.find(late / early, message)


def check_lstm_steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find a memory that is much larger at the last step than half-way through the episode.

    `steps` are the measured ones with `step`, `h_rms` and `c_rms`, in order. A memory fills during
    the first steps, so the first half says nothing.
    """
    known = [one for one in steps if one.get("step") is not None]
    if len(known) < 2:
        return
    last = known[-1]
    half = max(
        (one for one in known[:-1] if one["step"] <= last["step"] / 2),
        key=lambda one: float(one["step"]),
        default=None,
    )
    if half is None:
        return
    for name, part in _PARTS.items():
        before, after = half.get(name), last.get(name)
        if before and after:
            message = f"the LSTM's {part} is {{value:.3g}} times as large at step {last['step']} "
            message += f"as at step {half['step']}"
            yield from findings(LSTM_DRIFT.find(after / before, message, subject=part))


@register_monitor(
    reads=UpdateRow,
    thresholds="root mean square > 10 or < 1e-6 warning; not finite critical",
    advice="Check the LayerNorm after the LSTM, the forget bias and the gradient clip.",
)
def lstm_rms(recent: Recent) -> Iterator[Finding | None]:
    """The policy's memory has saturated or died."""
    newest = recent.updates[-1]
    for subject, rms in (("hidden state", newest.lstm_h_rms), ("cell state", newest.lstm_c_rms)):
        yield check_lstm_rms(subject, rms)


@register_monitor(
    reads=UpdateRow,
    thresholds="cell state beyond epoch 100 more than 2 times that before: warning",
    advice="Shorten episodes, clamp the cell softly, or use a second recurrent layer.",
)
def lstm_drift(recent: Recent) -> Iterator[Finding | None]:
    """The memory keeps growing in long episodes and may forget their start."""
    newest = recent.updates[-1]
    yield check_lstm_drift(newest.lstm_c_rms_early, newest.lstm_c_rms_late)


@register_monitor(
    reads=UpdateRow,
    thresholds="root mean square at the last measured step more than 2 times that half-way: "
    "warning",
    advice="Compare the steps in `updates.lstm_by_step`; clamp the cell softly or shorten "
    "episodes.",
)
def lstm_growth(recent: Recent) -> Iterator[Finding]:
    """The memory has not settled by the end of an episode, whatever its length."""
    steps = recent.updates[-1].lstm_by_step
    if isinstance(steps, Sequence):
        yield from check_lstm_steps(steps)


MEMORY = Limits(info=0.85, warning=0.90)
COOLDOWN_S = 60.0


def check_gpu_memory(samples: Sequence[tuple[float | None, float | None]]) -> Finding | None:
    """Find GPU memory running out, at most once a minute; samples are (time in s, share)."""
    fired_at: float | None = None
    found = None
    for at, share in samples:
        now = at or 0.0
        is_due = fired_at is None or now - fired_at >= COOLDOWN_S
        found = MEMORY.find(share, "{value:.0%} of the GPU's memory is in use") if is_due else None
        if found is not None:
            fired_at = now
    return found


_OF_GPU: dict[str, Any] = {
    "thresholds": "> 85 % info, > 90 % warning; once a minute",
    "advice": "Use fewer rows, a smaller batch, or cap the parameters.",
    "is_event": True,
    "is_volatile": True,
}


@register_monitor(reads=EpochRow, **_OF_GPU)
def gpu_memory(recent: Recent) -> Iterator[Finding | None]:
    """The GPU's memory is running out."""
    yield from _look(recent.epochs)


@register_monitor(reads=RoundRow, **_OF_GPU)
def gpu_memory_of_rounds(recent: Recent) -> Iterator[Finding | None]:
    """The GPU's memory is running out."""
    yield from _look(recent.rounds)


def _look(rows: Sequence[EpochRow] | Sequence[RoundRow]) -> Iterator[Finding | None]:
    # Without a GPU there is nothing to go through.
    if rows[-1].gpu_memory_share is not None:
        yield check_gpu_memory([(row.time, row.gpu_memory_share) for row in rows])
