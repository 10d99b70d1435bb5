"""Controllers, learned or not; importing this package registers them by name."""

from __future__ import annotations

from esper.tamiyo.controllers.ablated import FrozenCurves, OnlyCurves, WithoutCurves
from esper.tamiyo.controllers.baselines import RandomController, WaitController
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import find_policy, load_policy, new_policy, save_policy
from esper.tamiyo.controllers.pretrained import (
    Tamiyo,
    TamiyoController,
    find_controller,
    shipped_names,
)
from esper.tamiyo.controllers.registry import (
    CONTROLLERS,
    Choice,
    make_controller,
    pack_choices,
    register_controller,
)
from esper.tamiyo.controllers.schedule import ScheduleController
from esper.tamiyo.controllers.slope import SlopeConfig, SlopeController
from esper.tamiyo.controllers.trial import TrialConfig, TrialController

__all__ = [
    "CONTROLLERS",
    "Choice",
    "FrozenCurves",
    "HeuristicController",
    "LearnedController",
    "OnlyCurves",
    "RandomController",
    "ScheduleController",
    "SlopeConfig",
    "SlopeController",
    "Tamiyo",
    "TamiyoController",
    "TrialConfig",
    "TrialController",
    "WaitController",
    "WithoutCurves",
    "find_controller",
    "find_policy",
    "load_policy",
    "make_controller",
    "new_policy",
    "pack_choices",
    "register_controller",
    "save_policy",
    "shipped_names",
]
