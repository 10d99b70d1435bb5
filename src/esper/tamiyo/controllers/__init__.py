"""Controllers, learned or not; importing this package registers them by name."""

from esper.tamiyo.controllers.choices import Choice, is_legal, pack_choices
from esper.tamiyo.controllers.explanation import Contributor, Explanation
from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.controllers.learned import GreedyController, LearnedController
from esper.tamiyo.controllers.periodic import PeriodicConfig, PeriodicController
from esper.tamiyo.controllers.plateau import PlateauConfig, PlateauController
from esper.tamiyo.controllers.policy_file import (
    Policy,
    find_policy,
    load_policy,
    new_policy,
    save_policy,
)
from esper.tamiyo.controllers.pretrained import Tamiyo, TamiyoController, shipped_names
from esper.tamiyo.controllers.random import RandomController
from esper.tamiyo.controllers.registry import (
    CONTROLLERS,
    ControllerPlugin,
    make_controller,
    read_settings,
    refuse_argument,
    register_controller,
)
from esper.tamiyo.controllers.schedule import ScheduleController
from esper.tamiyo.controllers.wait import WaitController

__all__ = [
    "CONTROLLERS",
    "Choice",
    "Contributor",
    "ControllerPlugin",
    "Explanation",
    "GreedyController",
    "HeuristicConfig",
    "HeuristicController",
    "LearnedController",
    "PeriodicConfig",
    "PeriodicController",
    "PlateauConfig",
    "PlateauController",
    "Policy",
    "RandomController",
    "ScheduleController",
    "Tamiyo",
    "TamiyoController",
    "WaitController",
    "find_policy",
    "is_legal",
    "load_policy",
    "make_controller",
    "new_policy",
    "pack_choices",
    "read_settings",
    "refuse_argument",
    "register_controller",
    "save_policy",
    "shipped_names",
]
