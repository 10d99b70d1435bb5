"""Monitors of the machine; what they find may differ between identical runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from esper.nissa.monitors.recent import Recent
from esper.nissa.monitors.table import Finding, findings, register_monitor
from esper.nissa.schema import EpochRow, RoundRow

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
