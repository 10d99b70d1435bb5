"""Slots and blueprints: ids, kinds, topologies, axes, and symmetries of activations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from esper.leyline.errors import SlotError, UsageError, instead

# ---- Topologies, and ids and kinds of the built-in blueprints


Topology = Literal["cnn", "sequence", "vector"]
"""Kind of activation at a slot: [B, C, H, W], [B, T, C] or [B, C]."""

TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

TOPOLOGY_BY_RANK: dict[int, Topology] = {4: "cnn", 3: "sequence", 2: "vector"}

BlueprintKind = Literal[
    "identity",
    "norm",
    "convolution",
    "depthwise",
    "bottleneck",
    "attention",
    "lora",
    "mlp",
    "other",
]
"""What a blueprint does, roughly; a registered one without a kind is 'other'."""

Immediate = Literal["auto", "all", "none"]
"""Which seeds start at full amplitude: see `LifecycleConfig.immediate`."""

BLUEPRINT_KINDS: tuple[BlueprintKind, ...] = get_args(BlueprintKind)

_BUILTIN: dict[str, BlueprintKind] = {
    "noop": "identity",
    "conv_light": "convolution",
    "attention": "attention",
    "norm": "norm",
    "depthwise": "depthwise",
    "bottleneck": "bottleneck",
    "conv_small": "convolution",
    "conv_heavy": "convolution",
    "lora": "lora",
    "lora_large": "lora",
    "mlp_small": "mlp",
    "mlp": "mlp",
    "flex_attention": "attention",
}

BUILTIN_BLUEPRINTS: tuple[str, ...] = tuple(_BUILTIN)
"""Name of every built-in blueprint at the index that is its id; registered ones get the next."""

BUILTIN_KINDS: tuple[BlueprintKind, ...] = tuple(_BUILTIN.values())
"""The kind of every built-in blueprint at the index that is its id."""

NUM_BLUEPRINTS = len(BUILTIN_BLUEPRINTS)

NOOP = BUILTIN_BLUEPRINTS.index("noop")
"""The identity: can never be chosen, and is the placeholder where no blueprint is chosen."""


def kinds_of(names: Sequence[str]) -> tuple[BlueprintKind, ...]:
    """Return the kinds of built-in blueprints by name, 'other' for all others."""
    return tuple(_BUILTIN.get(name, "other") for name in names)


def channel_axis(topology: Topology) -> int:
    """Return the axis of the channels."""
    return 1 if topology == "cnn" else -1


# ---- The axes of an activation by name


AxesName = Literal["BC", "BTC", "TBC", "BCL", "BCHW", "BHWC"]
"""Orders of axes that an activation at a slot can have."""

AXES_NAMES: tuple[AxesName, ...] = get_args(AxesName)


@dataclass(frozen=True)
class Axes:
    """One order of axes."""

    name: AxesName
    topology: Topology
    order: tuple[int, ...]
    """Position here of each axis of the usual order."""

    @property
    def is_usual(self) -> bool:
        """Whether this is the order that blueprints work with."""
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
        """Position of each axis in the usual order."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))

    def turn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape in the usual order."""
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
    """Return the axes of this name, or raise with the known names."""
    if isinstance(name, str) and name in AXES:
        return AXES[name]
    raise SlotError(f"axes cannot be {name!r}{instead(name, AXES_NAMES, 'they are one of')}")


# ---- Symmetries of a network in the positions (tokens, patches, nodes) at a slot


Symmetry = Literal["bidirectional", "causal", "equivariant", "pointwise"]
"""Neither causal nor permutation-equivariant, one of the two, or both (pointwise)."""

MEANINGS: dict[Symmetry, str] = {
    "bidirectional": "positions see earlier and later ones",
    "causal": "no position sees later ones",
    "equivariant": "the order of positions does not matter",
    "pointwise": "no position sees another",
}
"""The meaning of each, for messages after "in this model"."""


def symmetry_of(*, causal: bool, equivariant: bool) -> Symmetry:
    """Return the name of a network with these symmetries."""
    if causal:
        return "pointwise" if equivariant else "causal"
    return "equivariant" if equivariant else "bidirectional"


def is_causal(symmetry: Symmetry) -> bool:
    """Return whether no position sees later ones."""
    return symmetry in ("causal", "pointwise")


def is_equivariant(symmetry: Symmetry) -> bool:
    """Return whether the order of positions does not matter."""
    return symmetry in ("equivariant", "pointwise")


_SLOT_ID = re.compile(r"r(\d+)c(\d+)\Z")


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """The slots a controller acts on, in action order."""

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Turn ids into a tuple; refuse an empty one and repeated ids."""
        if isinstance(self.slot_ids, str):
            raise UsageError(f"slot ids must be a tuple of names, got the text {self.slot_ids!r}")
        object.__setattr__(self, "slot_ids", tuple(self.slot_ids))
        if not self.slot_ids:
            raise UsageError("a SlotConfig needs at least one slot id, for example ('r0c0',)")
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise UsageError(f"slot ids must differ, got {', '.join(self.slot_ids)}")

    @classmethod
    def default(cls) -> SlotConfig:
        """Return the three slots r0c0, r0c1, r0c2."""
        return cls.of(3)

    @classmethod
    def of(cls, count: int) -> SlotConfig:
        """Return `count` slots in row 0."""
        return cls(tuple(slot_id(0, column) for column in range(count)))

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.slot_ids)

    def index(self, name: str) -> int:
        """Return the position of a slot id, or raise with the known ids."""
        if name not in self.slot_ids:
            raise UsageError(f"unknown slot {name!r}{instead(name, self.slot_ids)}")
        return self.slot_ids.index(name)


def slot_id(row: int, column: int) -> str:
    """Return the id of the slot in this row and column."""
    return f"r{row}c{column}"


def parse_slot_id(name: str) -> tuple[int, int]:
    """Return (row, column) of a slot id such as 'r0c2'."""
    match = _SLOT_ID.match(name)
    if match is None:
        raise UsageError(f"slot id must look like 'r0c2' (row, column), got {name!r}")
    return int(match[1]), int(match[2])
