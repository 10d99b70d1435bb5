"""Esper grows neural networks while they train.

`Deepen` wakes the blocks of a deep network step by step in a training loop of your own. `grow`
trains and grows a model from beginning to end; `Garden` and `Gardener` do the same in your own
loop. `Adapt` puts adapters on a frozen model. `train` trains a controller. The README shows
`Deepen` and `grow` in six lines each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper._version import __version__
from esper.leyline.registry import find_in

if TYPE_CHECKING:
    from esper.growth.adapters.adapt import Adapt
    from esper.growth.adapters.placement import AdaptConfig
    from esper.growth.config import GardenerConfig, GrowthConfig
    from esper.growth.depth.deepen import Deepen
    from esper.growth.depth.rules import DeepenConfig
    from esper.growth.depth.stacks import find_stacks
    from esper.growth.gardener import Gardener
    from esper.growth.grow import grow
    from esper.growth.grown import Deepened, Grown
    from esper.kasmina.blueprints import register_blueprint
    from esper.kasmina.evaluation import evaluate_contributions
    from esper.kasmina.flops import FlopCount, count_flops
    from esper.kasmina.garden import Garden, load_garden
    from esper.kasmina.hosts import register_host
    from esper.kasmina.lifecycle import GardenConfig
    from esper.kasmina.slots.selftest import check_slots
    from esper.kasmina.slots.suggestion import suggest_slots
    from esper.lab.population.population import Population
    from esper.lab.tasks import register_task
    from esper.leyline.errors import EsperError, EsperWarning
    from esper.nissa.folder import read_manifest
    from esper.nissa.reader import open_run
    from esper.simic.rewards import register_reward
    from esper.simic.training.recorded import Trained
    from esper.simic.training.train import train
    from esper.tamiyo.controllers import Tamiyo, register_controller
    from esper.utils.manifest import Manifest


__all__ = [
    "Adapt",
    "AdaptConfig",
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
    "esper.growth.adapters.adapt": ("Adapt",),
    "esper.growth.adapters.placement": ("AdaptConfig",),
    "esper.growth.depth.rules": ("DeepenConfig",),
    "esper.growth.depth.deepen": ("Deepen",),
    "esper.growth.depth.stacks": ("find_stacks",),
    "esper.growth.config": ("GardenerConfig", "GrowthConfig"),
    "esper.growth.gardener": ("Gardener",),
    "esper.growth.grown": ("Deepened", "Grown"),
    "esper.kasmina.blueprints": ("register_blueprint",),
    "esper.kasmina.evaluation": ("evaluate_contributions",),
    "esper.kasmina.flops": ("FlopCount", "count_flops"),
    "esper.kasmina.garden": ("Garden", "load_garden"),
    "esper.kasmina.lifecycle": ("GardenConfig",),
    "esper.kasmina.hosts": ("register_host",),
    "esper.kasmina.slots.selftest": ("check_slots",),
    "esper.kasmina.slots.suggestion": ("suggest_slots",),
    "esper.leyline.errors": ("EsperError", "EsperWarning"),
    "esper.utils.manifest": ("Manifest",),
    "esper.nissa.reader": ("open_run",),
    "esper.lab.population.population": ("Population",),
    "esper.nissa.folder": ("read_manifest",),
    "esper.growth.grow": ("grow",),
    "esper.simic.training.recorded": ("Trained",),
    "esper.simic.training.train": ("train",),
    "esper.simic.rewards": ("register_reward",),
    "esper.tamiyo.controllers": ("Tamiyo", "register_controller"),
    "esper.lab.tasks": ("register_task",),
}

__getattr__ = find_in(__name__, _HOMES)


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
