"""Durations that are meant for a run of 60 epochs or more, fitted into a shorter one."""

from __future__ import annotations

REFERENCE_HORIZON = 60
"""Epochs of a run in which durations are as they are written."""


def pace(horizon: int) -> float:
    """Return how many times as fast a run of this length has to be, 1 for long ones."""
    return max(1.0, REFERENCE_HORIZON / max(1, horizon))


def shortened(epochs: int, horizon: int) -> int:
    """Return a duration in proportion to the run: at least one epoch, and none stays none."""
    return min(epochs, max(1, round(epochs / pace(horizon))))
