"""How long a seed needs, and its life fitted into a short run.

Waits are meant for runs of 60 epochs or more. In a shorter one they are shortened in proportion,
and what counts as standing still is as much faster as the run is shorter: ten epochs hold what
sixty do.
"""

from __future__ import annotations

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.signals import TrackerConfig
from esper.leyline.horizon import pace, shortened

_MOST_STABLE = 0.5
"""A loss that falls by more of all progress in an epoch is not stable, however short the run."""


_KNOWN_LOSSES = 3
"""Epochs over which the tracker averages the fall of the loss before it can call one stable."""


def fit_lifecycle(config: LifecycleConfig, horizon: int) -> LifecycleConfig:
    """Return the life of a seed in a run of this length."""
    gates = config.gates
    return config.replace(
        embargo_ticks=shortened(config.embargo_ticks, horizon),
        gates=gates.replace(
            min_training_epochs=shortened(gates.min_training_epochs, horizon),
            min_blending_epochs=shortened(gates.min_blending_epochs, horizon),
        ),
    )


def fit_tracker(config: TrackerConfig, horizon: int) -> TrackerConfig:
    """Return when a host counts as stuck or settled in a run of this length."""
    faster = pace(horizon)
    return config.replace(
        plateau_points=config.plateau_points * faster,
        stable_gain=max(config.stable_gain, min(_MOST_STABLE, config.stable_gain * faster)),
        stable_loss=max(config.stable_loss, min(_MOST_STABLE, config.stable_loss * faster)),
        stable_epochs=shortened(config.stable_epochs, horizon),
    )


def inert_epochs(config: LifecycleConfig) -> int:
    """Return how many epochs a new seed lives through before it is first blended in."""
    # Germinated, unless it trains at once; then training until its gate opens.
    return config.gates.min_training_epochs + (0 if config.auto_training else 1)


def shortest_run(config: LifecycleConfig, tracker: TrackerConfig, *, must_settle: bool) -> int:
    """Return the fewest epochs in which a seed can come to be blended in.

    A controller that waits for the host to settle can act only once enough losses are known.
    """
    settled = _KNOWN_LOSSES + tracker.stable_epochs if must_settle and tracker.stable_epochs else 1
    return settled + inert_epochs(config) + 1
