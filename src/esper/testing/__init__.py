"""Conformance checks for plug-ins, which third parties can run on their own."""

from __future__ import annotations

from esper.lab.imagined import ImaginedRows, random_episode
from esper.testing.blueprints import check_blueprint
from esper.testing.controllers import check_controller, random_signals
from esper.testing.rewards import check_reward
from esper.testing.sinks import check_sink
from esper.testing.tasks import check_family, check_host, check_task

__all__ = [
    "ImaginedRows",
    "check_blueprint",
    "check_controller",
    "check_family",
    "check_host",
    "check_reward",
    "check_sink",
    "check_task",
    "random_episode",
    "random_signals",
]
