"""A reader's view of one slot of a garden."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from esper.kasmina.blueprints.registry import blueprint_names
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.blueprints import Topology
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from esper.kasmina.garden import Garden


class SlotView:
    """What is in a slot now; reads the garden each time it is asked."""

    def __init__(self, garden: Garden, index: int) -> None:
        """Look at slot `index` of this garden."""
        self._garden = garden
        self._index = index

    @property
    def name(self) -> str:
        """Name of the slot."""
        return self._garden.slot_names[self._index]

    @property
    def topology(self) -> Topology:
        """Kind of activation at the slot."""
        return self._garden.seedbed[self._index].topology

    @property
    def channels(self) -> int:
        """Width of the activation at the slot."""
        return self._garden.seedbed[self._index].channels

    @property
    def stage(self) -> SeedStage:
        """Stage of the seed, DORMANT when the slot is empty."""
        return SeedStage(int(self._value("stage")))

    @property
    def blueprint(self) -> str | None:
        """Name of the seed's blueprint, None when the slot is empty."""
        index = int(self._value("blueprint"))
        return None if index < 0 else blueprint_names()[index]

    @property
    def alpha(self) -> float:
        """Amplitude of the seed."""
        return self._value("alpha")

    @property
    def alpha_target(self) -> float:
        """Amplitude the seed is aimed at."""
        return self._value("alpha_target")

    @property
    def alpha_mode(self) -> AlphaMode:
        """Whether the amplitude holds, rises or falls."""
        return AlphaMode(int(self._value("alpha_mode")))

    @property
    def algorithm(self) -> AlphaAlgorithm:
        """How the seed is mixed in."""
        return AlphaAlgorithm(int(self._value("algorithm")))

    @property
    def epochs_in_stage(self) -> int:
        """Epochs recorded since the stage began."""
        return int(self._value("epochs_in_stage"))

    @property
    def age(self) -> int:
        """Epochs recorded since germination."""
        return int(self._value("age"))

    @property
    def parameters(self) -> int:
        """Parameters of the seed and its gate."""
        return int(self._value("params"))

    @property
    def contribution(self) -> float | None:
        """Points the network would lose without the seed, None before it was measured."""
        return self._measured("contribution")

    @property
    def contribution_se(self) -> float | None:
        """Standard error of the contribution, None before it was measured."""
        return self._measured("contribution_se")

    def __repr__(self) -> str:
        seed = f", {self.blueprint}, alpha={self.alpha:.2f}" if self.blueprint else ""
        return f"<slot {self.name}: {self.stage.name}{seed}>"

    def _value(self, field: str) -> float:
        return float(getattr(self._garden.state, field)[0, self._index])

    def _measured(self, field: str) -> float | None:
        value = self._value(field)
        return None if math.isnan(value) else value
