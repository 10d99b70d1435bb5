"""Blueprints: the kinds of seed modules, their registry and their fixed ids.

A blueprint is one `nn.Module` class whose constructor takes `(channels, topology)` and whose
forward keeps shape and dtype. `register_blueprint` adds it; `esper.testing.check_blueprint` runs
the battery every blueprint has to pass. `kin` has no class: its seeds are copies of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry
from esper.leyline.slots import (
    BLUEPRINT_KINDS,
    BUILTIN_BLUEPRINTS,
    NOOP,
    TOPOLOGIES,
    BlueprintKind,
    Immediate,
    Symmetry,
    Topology,
    is_causal,
    is_equivariant,
    symmetry_of,
)
from esper.utils.randomness import seeded

# ---- Group counts of GroupNorm, the same in hosts and seeds


SMALLEST_GROUPED_WIDTH = 32
MIN_CHANNELS_PER_GROUP = 16
GROUP_COUNTS = (32, 16, 8, 4, 2, 1)


def group_count(channels: int) -> int:
    """Return the number of GroupNorm groups for this many channels."""
    if channels < 1:
        raise UsageError(f"a group norm needs at least 1 channel, got {channels}")
    if channels < SMALLEST_GROUPED_WIDTH:
        return 1
    return next(
        count
        for count in GROUP_COUNTS
        if channels % count == 0 and channels // count >= MIN_CHANNELS_PER_GROUP
    )


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm over `channels` with the project's group count."""
    return nn.GroupNorm(group_count(channels), channels)


B = TypeVar("B", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A registered kind of seed."""

    name: str
    module: type[nn.Module] | None
    """Class of its seeds; None where a seed is a copy of the block in front of its slot."""
    topologies: tuple[Topology, ...]
    identity_at_start: tuple[Topology, ...]
    """The topologies in which a fresh seed returns its input unchanged."""
    note: str
    """One sentence for `esper blueprints`."""
    kind: BlueprintKind = "other"
    """Roughly what it does, for controllers that do not know it."""

    @property
    def is_copy(self) -> bool:
        """Whether a seed is a copy of the block in front of its slot."""
        return self.module is None

    def can_be_immediate(self, topology: Topology) -> bool:
        """Whether a seed may be at full amplitude from the first step: a copy, or the identity."""
        return self.is_copy or topology in self.identity_at_start

    @property
    def id(self) -> int:
        """Return the number that stands for this blueprint in actions and checkpoints."""
        return blueprint_names().index(self.name)

    def build(self, channels: int, topology: Topology, *, is_causal: bool = True) -> nn.Module:
        """Return a fresh module for a slot of this width, drawing from the global generator.

        Submodules with an attribute `is_causal` get it set: True where positions of a sequence must
        not see later ones.
        """
        if topology not in self.topologies:
            raise UsageError(
                f"blueprint {self.name!r} is for {' and '.join(self.topologies)} slots, "
                f"not for a {topology} slot; see `esper blueprints`"
            )
        if self.module is None:
            raise UsageError(
                f"a {self.name!r} seed is a copy of a block, which only a garden has; "
                f"write garden.germinate(slot, {self.name!r})"
            )
        module = self.module(channels, topology)
        for part in module.modules():
            if isinstance(getattr(part, "is_causal", None), bool):
                part.is_causal = is_causal  # type: ignore[assignment]
        return module


BLUEPRINTS: Registry[Blueprint] = Registry("blueprint")


def register_blueprint(
    name: str,
    *,
    topologies: Sequence[Topology],
    identity_at_start: Sequence[Topology] | None = None,
    note: str = "",
    kind: BlueprintKind = "other",
) -> Callable[[B], B]:
    """Register the decorated module class as the blueprint `name`.

    Args:
        name: lower_snake and not taken.
        topologies: where it can be germinated.
        identity_at_start: where a fresh seed returns its input unchanged; everywhere by default.
        note: one sentence for `esper blueprints`; the class docstring's first line by default.
        kind: roughly what it does. A controller that does not know the blueprint uses this and its
            costs.
    """

    def decorate(module: B) -> B:
        strangers = [topology for topology in topologies if topology not in TOPOLOGIES]
        if strangers or not topologies:
            raise UsageError(
                f"blueprint {name!r} needs topologies out of {', '.join(TOPOLOGIES)}, "
                f"got {list(topologies)!r}"
            )
        if kind not in BLUEPRINT_KINDS:
            raise UsageError(
                f"blueprint {name!r} needs a kind out of {', '.join(BLUEPRINT_KINDS)}, got {kind!r}"
            )
        summary = note or (module.__doc__ or "").strip().split("\n")[0]
        identity = tuple(topologies if identity_at_start is None else identity_at_start)
        blueprint = Blueprint(name, module, tuple(topologies), identity, summary, kind)
        BLUEPRINTS.register(name, blueprint)
        return module

    return decorate


def blueprint_names() -> tuple[str, ...]:
    """Return every blueprint's name at the index that is its id: built-ins first."""
    registered = BLUEPRINTS.names()
    return BUILTIN_BLUEPRINTS + tuple(name for name in registered if name not in BUILTIN_BLUEPRINTS)


def blueprint_kinds(names: Sequence[str] | None = None) -> tuple[BlueprintKind, ...]:
    """Return the kind of every blueprint, at the index that is its id, or of those named."""
    chosen = blueprint_names() if names is None else names
    return tuple(BLUEPRINTS.get(name).kind for name in chosen)


def blueprint_by_id(index: int) -> Blueprint:
    """Return the blueprint with this id."""
    names = blueprint_names()
    if not 0 <= index < len(names):
        raise UsageError(f"blueprint ids are 0 to {len(names) - 1}, got {index}")
    return BLUEPRINTS.get(names[index])


def drawn_names() -> tuple[str, ...]:
    """Return the names up to the last blueprint that is no copy: those of populations by default.

    A copy between them keeps its id, and fits no slot of a population that grows no copies.
    """
    names = blueprint_names()
    while BLUEPRINTS.get(names[-1]).is_copy:
        names = names[:-1]
    return names


def copied_names() -> tuple[str, ...]:
    """Return the blueprints whose seeds are copies of the host's own blocks."""
    return tuple(name for name in blueprint_names() if BLUEPRINTS.get(name).is_copy)


def selectable(topology: Topology) -> tuple[int, ...]:
    """Return the ids that may be germinated in any slot of this topology; never noop, nor copies.

    Whether a copy can be germinated depends on the block in front of the slot.
    """

    def is_for_it(blueprint: Blueprint) -> bool:
        return topology in blueprint.topologies and not blueprint.is_copy

    return tuple(
        index
        for index, name in enumerate(blueprint_names())
        if index != NOOP and is_for_it(BLUEPRINTS.get(name))
    )


def immediate_table(
    slots: Sequence[tuple[Topology, bool]], rule: Immediate, names: Sequence[str]
) -> Tensor:
    """Return bool [S, B]: which seeds are at full amplitude from the first step.

    Args:
        slots: the topology of each, and whether the submodule in front of it is frozen.
        rule: `LifecycleConfig.immediate`.
        names: the blueprints, at the index that is their id.
    """

    def is_immediate(blueprint: Blueprint, topology: Topology, is_frozen: bool) -> bool:
        wanted = rule == "all" or (rule == "auto" and (blueprint.is_copy or is_frozen))
        return wanted and blueprint.can_be_immediate(topology)

    chosen = [BLUEPRINTS.get(name) for name in names]
    return torch.tensor(
        [[is_immediate(blueprint, *slot) for blueprint in chosen] for slot in slots]
    )


@lru_cache(maxsize=4096)
def count_parameters(blueprint: Blueprint, channels: int, topology: Topology) -> int:
    """Return the trainable parameters of a seed of this width, without allocating it."""
    with torch.device("meta"):
        built = blueprint.build(channels, topology)
    return sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)


# ---- Which blueprints a slot is offered: those that keep the symmetries of its host


_WIDTHS = (8, 64)
"""Channels of the tested seed; the second where a blueprint does not take the first."""

_PLACES = 6
_ROUNDING = 1e-9


def offered(topology: Topology, symmetry: Symmetry) -> tuple[int, ...]:
    """Return the ids that may be germinated in a slot of this kind; never noop."""
    names = blueprint_names()
    left_out = withheld(topology, symmetry)
    return tuple(choice for choice in selectable(topology) if names[choice] not in left_out)


def withheld(topology: Topology, symmetry: Symmetry) -> tuple[str, ...]:
    """Return the blueprints that would break a symmetry of the host of such a slot."""
    if symmetry == "bidirectional" or topology == "vector":
        return ()
    choices = [blueprint_by_id(choice) for choice in selectable(topology)]
    return tuple(one.name for one in choices if not _keeps(one, topology, symmetry))


def _keeps(blueprint: Blueprint, topology: Topology, symmetry: Symmetry) -> bool:
    own = seed_symmetry(blueprint, topology, is_causal=is_causal(symmetry))
    keeps_causal = is_causal(own) or not is_causal(symmetry)
    return keeps_causal and (is_equivariant(own) or not is_equivariant(symmetry))


@lru_cache(maxsize=1024)
def seed_symmetry(blueprint: Blueprint, topology: Topology, *, is_causal: bool) -> Symmetry:
    """Return the symmetry of a seed in a host that is causal or not.

    A seed that cannot be tested counts as having none.
    """
    for width in _WIDTHS:
        try:
            with seeded("symmetry"), torch.no_grad():
                return _measure(blueprint, width, topology, is_causal)
        except Exception:
            # Third-party code may take other widths only.
            continue
    return "bidirectional"


def _measure(blueprint: Blueprint, width: int, topology: Topology, causal: bool) -> Symmetry:
    seed = blueprint.build(width, topology, is_causal=causal).double().eval()
    for parameter in seed.parameters():
        parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    if topology == "cnn":
        x = torch.randn(2, width, _PLACES, _PLACES, dtype=torch.float64)
        reorders = all(_is_reordered(seed, x, axis) for axis in (2, 3))
        return symmetry_of(causal=False, equivariant=reorders)
    x = torch.randn(2, _PLACES, width, dtype=torch.float64)
    changed = x.clone()
    half = _PLACES // 2
    changed[:, half:] = torch.randn(changed[:, half:].shape, dtype=torch.float64)
    looks_ahead = not _same(seed(x)[:, :half], seed(changed)[:, :half])
    return symmetry_of(causal=not looks_ahead, equivariant=_is_reordered(seed, x, 1))


def _is_reordered(seed: nn.Module, x: Tensor, axis: int) -> bool:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    return _same(seed(x.index_select(axis, order)), seed(x).index_select(axis, order))


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _ROUNDING * one.abs().max())
