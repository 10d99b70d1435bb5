"""What an observation costs: all rows together against the readable reference, row by row.

Both take turns on the same signals; times are those of the thread itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from esper.bench.timing import take_turns
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.reference import plain_reports

_CALLS = 20
"""Extractions timed together; the reference is timed once in the same turn."""


@dataclass(frozen=True, slots=True)
class ExtractionTiming:
    """What one observation costs."""

    rows: int
    slots: int
    occupied: float
    """Share of slots that hold a record; an empty slot costs the reference next to nothing."""
    extraction_us: float
    """Microseconds per row, of all rows together."""
    reference_us: float
    """Microseconds per row, one by one from plain floats."""
    ratio: float
    """How many times faster; the median over the turns."""


def time_extraction(signals: Signals, turns: int) -> ExtractionTiming:
    """Time both ways to the observation of these signals."""
    slots = SlotConfig.of(signals.num_slots)
    reports = plain_reports(signals, slots)
    pairs = take_turns(
        lambda: batch_obs_to_features(signals, slots),
        lambda: batch_obs_to_features(*reports, slots),
        rounds=turns,
        calls=_CALLS,
    )
    per_row = 1e6 / signals.rows
    return ExtractionTiming(
        rows=signals.rows,
        slots=slots.num_slots,
        occupied=float(signals.occupied.float().mean()),
        extraction_us=per_row * median(ours.cpu for ours, _ in pairs),
        reference_us=per_row * median(theirs.cpu for _, theirs in pairs),
        ratio=median(theirs.cpu / ours.cpu for ours, theirs in pairs),
    )
