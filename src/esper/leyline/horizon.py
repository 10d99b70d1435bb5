"""Durations that are meant for a run of 60 epochs or more, fitted into a shorter one."""

from __future__ import annotations

REFERENCE_HORIZON = 60
"""Epochs of a run in which durations are as they are written."""


CALM_SHARE = 0.5
"""In a run of less than this share of the shortest that a policy learned in, it has to hurry."""

LEAST_SHARE = 0.3
"""A run of less than this share of the shortest that a policy learned in is strange to it.

The one that ships learned in 40 epochs or more. In less than 12 it germinates, if at all, too late
for a seed to be blended in wholly, however it hurries (docs/log.md).
"""


def is_strange(horizon: int, learned: int) -> bool:
    """Return whether a run is much shorter than those that a policy learned in; 0: unknown."""
    return horizon < LEAST_SHARE * learned


def pace(horizon: int) -> float:
    """Return how many times as fast a run of this length has to be, 1 for long ones."""
    return max(1.0, REFERENCE_HORIZON / max(1, horizon))


def shortened(epochs: int, horizon: int) -> int:
    """Return a duration in proportion to the run: at least one epoch, and none stays none."""
    return min(epochs, max(1, round(epochs / pace(horizon))))
