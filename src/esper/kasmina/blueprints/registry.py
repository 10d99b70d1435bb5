"""Blueprints: the kinds of seed modules, their registry and their fixed ids.

A blueprint is one `nn.Module` class whose constructor takes `(channels, topology)` and whose
forward keeps shape and dtype. `register_blueprint` adds it; `esper.testing.check_blueprint` runs
the battery every blueprint has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import nn

from esper.leyline.blueprints import (
    BLUEPRINT_KINDS,
    BUILTIN_BLUEPRINTS,
    NOOP,
    TOPOLOGIES,
    BlueprintKind,
    Topology,
)
from esper.leyline.errors import UsageError
from esper.leyline.registry import Registry

B = TypeVar("B", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A registered kind of seed."""

    name: str
    module: type[nn.Module]
    topologies: tuple[Topology, ...]
    identity_at_start: tuple[Topology, ...]
    """The topologies in which a fresh seed returns its input unchanged."""
    note: str
    """One sentence for `esper blueprints`."""
    kind: BlueprintKind = "other"
    """Roughly what it does, for controllers that never met it."""

    @property
    def id(self) -> int:
        """Return the number that stands for this blueprint in actions and checkpoints."""
        return blueprint_names().index(self.name)

    def build(self, channels: int, topology: Topology, *, is_causal: bool = True) -> nn.Module:
        """Return a fresh module for a slot of this width, drawing from the global generator.

        A part of it with the attribute `is_causal` is told whether its host is causal, that is,
        whether positions of a sequence may see no later ones.
        """
        if topology not in self.topologies:
            raise UsageError(
                f"blueprint {self.name!r} is for {' and '.join(self.topologies)} slots, "
                f"not for a {topology} slot; see `esper blueprints`"
            )
        module: nn.Module = self.module(channels, topology)
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
        kind: roughly what it does. A controller that never met the blueprint goes by this and by
            what it costs.
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


def blueprint_kinds() -> tuple[BlueprintKind, ...]:
    """Return every blueprint's kind at the index that is its id."""
    return tuple(BLUEPRINTS.get(name).kind for name in blueprint_names())


def blueprint_by_id(index: int) -> Blueprint:
    """Return the blueprint with this id."""
    names = blueprint_names()
    if not 0 <= index < len(names):
        raise UsageError(f"blueprint ids are 0 to {len(names) - 1}, got {index}")
    return BLUEPRINTS.get(names[index])


def selectable(topology: Topology) -> tuple[int, ...]:
    """Return the ids that may be germinated in a slot of this topology; never noop."""
    return tuple(
        index
        for index, name in enumerate(blueprint_names())
        if index != NOOP and topology in BLUEPRINTS.get(name).topologies
    )


@lru_cache(maxsize=4096)
def count_parameters(blueprint: Blueprint, channels: int, topology: Topology) -> int:
    """Return the trainable parameters of a seed of this width, without allocating it."""
    with torch.device("meta"):
        built = blueprint.build(channels, topology)
    return sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
