"""Esper grows neural networks while they train.

`grow` grows a model from beginning to end; `Garden` and `Gardener` do the same inside a training
loop of your own; `train` trains a controller. See the README for both in a few lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper._lazy import find_in
from esper._version import __version__

if TYPE_CHECKING:
    from esper.growth.depth.config import DeepenConfig
    from esper.growth.depth.deepen import Deepen
    from esper.growth.depth.stacks import find_stacks
    from esper.growth.gardener import Gardener, GardenerConfig
    from esper.growth.grown import Deepened, Grown
    from esper.growth.run import GrowthConfig
    from esper.kasmina.blueprints import register_blueprint
    from esper.kasmina.evaluation import evaluate_contributions
    from esper.kasmina.flops import FlopCount, count_flops
    from esper.kasmina.garden import Garden
    from esper.kasmina.garden_config import GardenConfig
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
    "Deepen",
    "DeepenConfig",
    "Deepened",
    "EsperError",
    "EsperWarning",
    "FlopCount",
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
    "count_flops",
    "evaluate_contributions",
    "find_stacks",
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
    "esper.growth.depth.config": ("DeepenConfig",),
    "esper.growth.depth.deepen": ("Deepen",),
    "esper.growth.depth.stacks": ("find_stacks",),
    "esper.growth.gardener": ("Gardener", "GardenerConfig"),
    "esper.growth.grown": ("Deepened", "Grown"),
    "esper.growth.run": ("GrowthConfig",),
    "esper.kasmina.blueprints": ("register_blueprint",),
    "esper.kasmina.evaluation": ("evaluate_contributions",),
    "esper.kasmina.flops": ("FlopCount", "count_flops"),
    "esper.kasmina.garden": ("Garden",),
    "esper.kasmina.garden_config": ("GardenConfig",),
    "esper.kasmina.hosts": ("register_host",),
    "esper.kasmina.loading": ("load_garden",),
    "esper.kasmina.selftest": ("check_slots",),
    "esper.kasmina.suggestion": ("suggest_slots",),
    "esper.leyline.errors": ("EsperError", "EsperWarning"),
    "esper.leyline.manifest": ("Manifest",),
    "esper.nissa.reader": ("open_run",),
    "esper.population.population": ("Population",),
    "esper.runs.checkpoint": ("read_manifest",),
    "esper.runs.grow": ("grow",),
    "esper.runs.train": ("Trained", "train"),
    "esper.simic.rewards": ("register_reward",),
    "esper.tamiyo.controllers": ("Tamiyo", "register_controller"),
    "esper.tasks": ("register_task",),
}

__getattr__ = find_in(__name__, _HOMES)


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
