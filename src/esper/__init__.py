"""Esper grows neural networks while they train.

`grow` grows a model from beginning to end; `Garden` and `Gardener` do the same inside a training
loop of your own; `train` trains a controller. See the README for both in a few lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper._lazy import find_in
from esper._version import __version__

if TYPE_CHECKING:
    from esper.growth.gardener import Gardener, GardenerConfig
    from esper.growth.grown import Grown
    from esper.growth.run import GrowthConfig
    from esper.kasmina.blueprints import register_blueprint
    from esper.kasmina.evaluation import evaluate_contributions
    from esper.kasmina.garden import Garden, GardenConfig
    from esper.kasmina.hosts import register_host
    from esper.kasmina.loading import load_garden
    from esper.kasmina.selftest import check_slots
    from esper.kasmina.suggestion import suggest_slots
    from esper.leyline.errors import EsperError, EsperWarning
    from esper.leyline.manifest import Manifest
    from esper.nissa.reader import open_run
    from esper.population.population import Population
    from esper.runs.checkpoint import read_manifest
    from esper.runs.grow import grow
    from esper.runs.train import Trained, train
    from esper.simic.rewards import register_reward
    from esper.tamiyo.controllers import Tamiyo, register_controller
    from esper.tasks import register_task

__all__ = [
    "EsperError",
    "EsperWarning",
    "Garden",
    "GardenConfig",
    "Gardener",
    "GardenerConfig",
    "Grown",
    "GrowthConfig",
    "Manifest",
    "Population",
    "Tamiyo",
    "Trained",
    "__version__",
    "check_slots",
    "evaluate_contributions",
    "grow",
    "load_garden",
    "open_run",
    "read_manifest",
    "register_blueprint",
    "register_controller",
    "register_host",
    "register_reward",
    "register_task",
    "suggest_slots",
    "train",
]

_HOMES = {
    "EsperError": "esper.leyline.errors",
    "EsperWarning": "esper.leyline.errors",
    "Garden": "esper.kasmina.garden",
    "GardenConfig": "esper.kasmina.garden",
    "Gardener": "esper.growth.gardener",
    "GardenerConfig": "esper.growth.gardener",
    "Grown": "esper.growth.grown",
    "GrowthConfig": "esper.growth.run",
    "Manifest": "esper.leyline.manifest",
    "Population": "esper.population.population",
    "Tamiyo": "esper.tamiyo.controllers",
    "Trained": "esper.runs.train",
    "check_slots": "esper.kasmina.selftest",
    "evaluate_contributions": "esper.kasmina.evaluation",
    "grow": "esper.runs.grow",
    "load_garden": "esper.kasmina.loading",
    "open_run": "esper.nissa.reader",
    "read_manifest": "esper.runs.checkpoint",
    "register_blueprint": "esper.kasmina.blueprints",
    "register_controller": "esper.tamiyo.controllers",
    "register_host": "esper.kasmina.hosts",
    "register_reward": "esper.simic.rewards",
    "register_task": "esper.tasks",
    "suggest_slots": "esper.kasmina.suggestion",
    "train": "esper.runs.train",
}

__getattr__ = find_in(__name__, _HOMES)


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
