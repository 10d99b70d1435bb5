"""How long a seed needs, and its life fitted into a short run.

Waits are meant for runs of 60 epochs or more. In a shorter one they are shortened in proportion,
and what counts as standing still is as much faster as the run is shorter: ten epochs hold what
sixty do.
"""

from __future__ import annotations

import math

from esper.kasmina.blueprints.registry import blueprint_kinds, blueprint_names, copied_names
from esper.kasmina.costs import NO_LIMIT, as_options, times_host
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.signals import TrackerConfig
from esper.leyline.controller import (
    LEAST_SHARE,
    Controller,
    ControllerContext,
    GrowthLimits,
    Limited,
    is_too_short,
    pace,
    shortened,
)
from esper.tamiyo.controllers import HeuristicController, LearnedController, WaitController

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


# ---- What follows from a controller at the start of a run: its limits, and doubts of any growth


def controller_context(garden: Garden, seed: int) -> ControllerContext:
    """Return what a controller is made for."""
    return ControllerContext(
        slot_names=garden.slot_names,
        blueprint_names=blueprint_names(),
        blueprint_kinds=blueprint_kinds(),
        copies=copied_names(),
        seed=seed,
        inert_epochs=inert_epochs(garden.config.lifecycle),
    )


_RULES = "let rules decide (controller='heuristic')"


def learned_limits(controller: Controller, garden: Garden) -> dict[str, int]:
    """Return limits of growth that a garden lacks and its controller learned under.

    What a policy does without a limit, when it never lived with none, nobody has measured; one
    clone germinated and pruned by turns.
    """
    limits = controller.limits if isinstance(controller, Limited) else GrowthLimits()
    parameters = flops = NO_LIMIT
    if garden.param_limit == NO_LIMIT:
        # A host that is frozen altogether has no parameters to be a multiple of.
        parameters = times_host(limits.parameters, garden.count_host_parameters()) or NO_LIMIT
    if garden.flop_limit == NO_LIMIT and garden.placed.is_counted:
        flops = times_host(limits.flops, garden.host_flops)
    return as_options(parameters, flops, garden.host_flops)


def startup_warning(
    controller: Controller, garden: Garden, tracker: TrackerConfig, horizon: int
) -> str | None:
    """Return why hardly anything will grow, and what to do about it; None where it may well grow.

    Args:
        controller: who will decide.
        garden: what is to grow, with the life of seeds in a run of this length.
        tracker: when the host counts as settled in such a run.
        horizon: epochs of the run.
    """
    if isinstance(controller, WaitController):
        return None
    is_heuristic = isinstance(controller, HeuristicController)
    needed = shortest_run(garden.config.lifecycle, tracker, must_settle=is_heuristic)
    if horizon < needed:
        return (
            f"{horizon} epochs are too few to grow in: before a seed is blended in, {needed} pass "
            "at least; train for more epochs"
        )
    if not isinstance(controller, LearnedController):
        return None
    learned = controller.policy.horizon
    if is_too_short(horizon, learned):
        return (
            f"{horizon} epochs may be too few to grow in: the controller has learned in runs of "
            f"{learned} or more, and may act too late for a seed to be blended in; train for "
            f"{math.ceil(LEAST_SHARE * learned)} or more, or {_RULES}"
        )
    return None
