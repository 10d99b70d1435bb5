"""What follows from a controller at the start of a run: its limits, and doubts of any growth."""

from __future__ import annotations

import math

from esper.growth.horizon import shortest_run
from esper.kasmina.costs import NO_LIMIT
from esper.kasmina.garden import Garden
from esper.kasmina.signals import TrackerConfig
from esper.leyline.controller import Controller, GrowthLimits, Limited
from esper.leyline.horizon import LEAST_SHARE, is_strange
from esper.tamiyo.controllers import HeuristicController, LearnedController, WaitController

_RULES = "let rules decide (controller='heuristic')"


def learned_limits(controller: Controller, garden: Garden) -> dict[str, int]:
    """Return limits of growth that a garden lacks and its controller learned under.

    What a policy does without a limit, when it never lived with none, nobody has measured; one
    clone germinated and pruned by turns.
    """
    limits = controller.limits if isinstance(controller, Limited) else GrowthLimits()
    found = {}
    # A host that is frozen altogether has no parameters to be a multiple of.
    parameters = math.floor((limits.parameters or 0.0) * garden.count_host_parameters())
    if parameters and garden.param_limit == NO_LIMIT:
        found["max_parameters"] = parameters
    if limits.flops is not None and garden.is_counted and garden.flop_limit == NO_LIMIT:
        # 0 would be no limit; nothing that is counted costs as little as 1.
        added = math.floor((limits.flops - 1.0) * garden.host_flops)
        found["max_added_flops"] = max(1, added)
    return found


def find_doubt(
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
    if is_strange(horizon, learned):
        return (
            f"{horizon} epochs may be too few to grow in: the controller has learned in runs of "
            f"{learned} or more, and may act too late for a seed to be blended in; train for "
            f"{math.ceil(LEAST_SHARE * learned)} or more, or {_RULES}"
        )
    if not garden.count_host_parameters():
        return (
            "nothing of the model trains, which no controller has learned with; this one may only "
            f"wait: {_RULES}"
        )
    return None
