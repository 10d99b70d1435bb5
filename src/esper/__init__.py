"""Esper grows neural networks while they train.

`grow` grows a model from beginning to end; `Garden` and `Gardener` do the same inside a training
loop of your own. See the README for both in a few lines.
"""

from __future__ import annotations

from esper._version import __version__
from esper.growth.gardener import Gardener, GardenerConfig
from esper.growth.grow import grow
from esper.growth.grown import Grown
from esper.growth.run import GrowthConfig
from esper.kasmina.blueprints import register_blueprint
from esper.kasmina.evaluation import evaluate_contributions
from esper.kasmina.garden import Garden, GardenConfig, load_garden
from esper.kasmina.hosts import register_host
from esper.leyline.errors import EsperError, EsperWarning
from esper.population.population import Population
from esper.tamiyo.controllers import register_controller
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
    "Population",
    "__version__",
    "evaluate_contributions",
    "grow",
    "load_garden",
    "register_blueprint",
    "register_controller",
    "register_host",
    "register_task",
]
