"""The axes of an activation by name, and what they are to a seed.

B are samples, C channels, T and L positions of a sequence, H and W those of an image. A blueprint
only ever sees the usual form of its topology, [B, C], [B, T, C] or [B, C, H, W]; a slot whose host
has another one turns the activation around the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from esper.leyline.blueprints import Topology
from esper.leyline.errors import SlotError, instead

AxesName = Literal["BC", "BTC", "TBC", "BCL", "BCHW", "BHWC"]
"""What the axes of an activation at a slot can be."""

AXES_NAMES: tuple[AxesName, ...] = get_args(AxesName)


@dataclass(frozen=True)
class Axes:
    """One order of axes."""

    name: AxesName
    topology: Topology
    order: tuple[int, ...]
    """Where each axis of the usual form is found here."""

    @property
    def is_usual(self) -> bool:
        """Whether blueprints see the activation as it is."""
        return self.order == tuple(range(len(self.order)))

    @property
    def batch(self) -> int:
        """The axis of the samples."""
        return self.name.index("B")

    @property
    def channels(self) -> int:
        """The axis of the channels."""
        return self.name.index("C")

    @cached_property
    def inverse(self) -> tuple[int, ...]:
        """Where each axis here is found in the usual form."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))

    def turn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape in the usual form."""
        return tuple(shape[axis] for axis in self.order)


AXES: dict[AxesName, Axes] = {
    axes.name: axes
    for axes in (
        Axes("BC", "vector", (0, 1)),
        Axes("BTC", "sequence", (0, 1, 2)),
        Axes("TBC", "sequence", (1, 0, 2)),
        Axes("BCL", "sequence", (0, 2, 1)),
        Axes("BCHW", "cnn", (0, 1, 2, 3)),
        Axes("BHWC", "cnn", (0, 3, 1, 2)),
    )
}

USUAL_AXES: dict[Topology, AxesName] = {
    axes.topology: axes.name for axes in AXES.values() if axes.is_usual
}

RANKS = tuple(sorted({len(name) for name in AXES_NAMES}))


def parse_axes(name: object) -> Axes:
    """Return the axes of this name, or refuse it with the names there are."""
    if isinstance(name, str) and name in AXES:
        return AXES[name]
    raise SlotError(f"axes cannot be {name!r}{instead(name, AXES_NAMES, 'they are one of')}")
