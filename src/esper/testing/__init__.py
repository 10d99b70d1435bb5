"""Conformance batteries: what every plug-in must satisfy, for third parties to run on theirs."""

from __future__ import annotations

from esper.testing.blueprints import check_blueprint
from esper.testing.controllers import check_controller
from esper.testing.families import check_family
from esper.testing.hosts import check_host
from esper.testing.imagined import ImaginedRows, random_episode
from esper.testing.rewards import check_reward
from esper.testing.signals import random_signals
from esper.testing.sinks import check_sink
from esper.testing.tasks import check_task

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
