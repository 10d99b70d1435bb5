"""Controllers that need no learning; importing this package registers them by name."""

from esper.tamiyo.controllers.choices import Choice, is_legal, pack_choices
from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.controllers.random import RandomController
from esper.tamiyo.controllers.registry import (
    CONTROLLERS,
    ControllerPlugin,
    make_controller,
    refuse_argument,
    register_controller,
)
from esper.tamiyo.controllers.schedule import ScheduleController
from esper.tamiyo.controllers.wait import WaitController

__all__ = [
    "CONTROLLERS",
    "Choice",
    "ControllerPlugin",
    "HeuristicConfig",
    "HeuristicController",
    "RandomController",
    "ScheduleController",
    "WaitController",
    "is_legal",
    "make_controller",
    "pack_choices",
    "refuse_argument",
    "register_controller",
]
