"""Monitors of the policy's memory, and of the machine's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper.nissa.monitors.table import Finding, Recent, findings, register_monitor
from esper.nissa.schema import EpochRow, RoundRow, UpdateRow

LSTM_RMS_MAX = 10.0
LSTM_RMS_MIN = 1e-6
LSTM_DRIFT = 2.0
_PARTS = {"h_rms": "hidden state", "c_rms": "cell state"}


def check_lstm_rms(subject: str, rms: float | None) -> Finding | None:
    """Find a memory that has exploded, died or is not finite."""
    if rms is None:
        return None
    if not math.isfinite(rms):
        return Finding(
            severity="critical",
            subject=subject,
            value=rms,
            message=f"the LSTM's {subject} is not finite",
        )
    if LSTM_RMS_MIN <= rms <= LSTM_RMS_MAX:
        return None
    limit = LSTM_RMS_MAX if rms > LSTM_RMS_MAX else LSTM_RMS_MIN
    return Finding(
        severity="warning",
        subject=subject,
        value=rms,
        threshold=limit,
        message=f"the LSTM's {subject} has a root mean square of {rms:.3g} (limit {limit:g})",
    )


def check_lstm_drift(early: float | None, late: float | None) -> Finding | None:
    """Find a memory that keeps growing late in long episodes."""
    if early is None or late is None or early <= 0 or late <= LSTM_DRIFT * early:
        return None
    return Finding(
        severity="warning",
        value=late / early,
        threshold=LSTM_DRIFT,
        message=f"the LSTM's cell state is {late / early:.3g} times as large beyond epoch 100",
    )


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
        if before and after and after > LSTM_DRIFT * before:
            yield Finding(
                severity="warning",
                subject=part,
                value=after / before,
                threshold=LSTM_DRIFT,
                message=f"the LSTM's {part} is {after / before:.3g} times as large at step "
                f"{last['step']} as at step {half['step']}",
            )


@register_monitor(
    "lstm_rms",
    reads=UpdateRow,
    thresholds="root mean square > 10 or < 1e-6 warning; not finite critical",
    meaning="The policy's memory has saturated or died.",
    advice="Check the LayerNorm after the LSTM, the forget bias and the gradient clip.",
)
def lstm_rms(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    newest = recent.updates[-1]
    for subject, rms in (("hidden state", newest.lstm_h_rms), ("cell state", newest.lstm_c_rms)):
        yield from findings(check_lstm_rms(subject, rms))


@register_monitor(
    "lstm_drift",
    reads=UpdateRow,
    thresholds="cell state beyond epoch 100 more than 2 times that before: warning",
    meaning="The memory keeps growing in long episodes and may forget their start.",
    advice="Shorten episodes, clamp the cell softly, or use a second recurrent layer.",
)
def lstm_drift(recent: Recent) -> Iterator[Finding]:
    """Look at the newest update."""
    newest = recent.updates[-1]
    yield from findings(check_lstm_drift(newest.lstm_c_rms_early, newest.lstm_c_rms_late))


@register_monitor(
    "lstm_growth",
    reads=UpdateRow,
    thresholds="root mean square at the last measured step more than 2 times that half-way: "
    "warning",
    meaning="The memory has not settled by the end of an episode, whatever its length.",
    advice="Compare the steps in `updates.lstm_by_step`; clamp the cell softly or shorten "
    "episodes.",
)
def lstm_growth(recent: Recent) -> Iterator[Finding]:
    """Look at the steps of the newest update."""
    steps = recent.updates[-1].lstm_by_step
    if isinstance(steps, Sequence):
        yield from check_lstm_steps(steps)


MEMORY_EVENT = 0.85
MEMORY_WARNING = 0.90
COOLDOWN_S = 60.0


def check_gpu_memory(samples: Sequence[tuple[float | None, float | None]]) -> Finding | None:
    """Find GPU memory running out, at most once a minute; samples are (time in s, share)."""
    fired_at: float | None = None
    fires = False
    share = None
    for at, share in samples:
        now = at or 0.0
        is_due = fired_at is None or now - fired_at >= COOLDOWN_S
        fires = share is not None and share > MEMORY_EVENT and is_due
        if fires:
            fired_at = now
    if not fires or share is None:
        return None
    is_warning = share > MEMORY_WARNING
    return Finding(
        severity="warning" if is_warning else "info",
        value=share,
        threshold=MEMORY_WARNING if is_warning else MEMORY_EVENT,
        message=f"{share:.0%} of the GPU's memory is in use",
    )


_TEXTS = {
    "thresholds": "> 85 % info, > 90 % warning; once a minute",
    "meaning": "The GPU's memory is running out.",
    "advice": "Use fewer rows, a smaller batch, or cap the parameters.",
}


@register_monitor(
    "gpu_memory",
    reads=EpochRow,
    thresholds=_TEXTS["thresholds"],
    meaning=_TEXTS["meaning"],
    advice=_TEXTS["advice"],
    is_event=True,
    is_volatile=True,
)
def gpu_memory(recent: Recent) -> Iterator[Finding]:
    """Look at the epochs so far."""
    yield from _look(recent.epochs)


@register_monitor(
    "gpu_memory_of_rounds",
    reads=RoundRow,
    thresholds=_TEXTS["thresholds"],
    meaning=_TEXTS["meaning"],
    advice=_TEXTS["advice"],
    is_event=True,
    is_volatile=True,
)
def gpu_memory_of_rounds(recent: Recent) -> Iterator[Finding]:
    """Look at the rounds so far."""
    yield from _look(recent.rounds)


def _look(rows: Sequence[EpochRow] | Sequence[RoundRow]) -> Iterator[Finding]:
    # Without a GPU there is nothing to go through.
    if rows[-1].gpu_memory_share is not None:
        yield from findings(check_gpu_memory([(row.time, row.gpu_memory_share) for row in rows]))
