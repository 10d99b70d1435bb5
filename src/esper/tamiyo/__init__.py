"""Tamiyo is the controller: once per epoch it reads every host's signals and decides what to grow.

The controllers here need no learning; each is known by a name ('wait', 'random', 'heuristic',
'schedule:FILE'), and `make_controller` turns a name into one.
"""

from esper.tamiyo.controllers import (
    CONTROLLERS,
    HeuristicConfig,
    HeuristicController,
    RandomController,
    ScheduleController,
    WaitController,
    make_controller,
    register_controller,
)

__all__ = [
    "CONTROLLERS",
    "HeuristicConfig",
    "HeuristicController",
    "RandomController",
    "ScheduleController",
    "WaitController",
    "make_controller",
    "register_controller",
]
