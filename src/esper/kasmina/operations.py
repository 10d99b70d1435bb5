"""Operations by hand: checks their arguments and turns names into a `Command`."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import torch

from esper.kasmina.blueprints.registry import Blueprint
from esper.leyline.actions import PLACEHOLDERS, Command, LifecycleOp
from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.slots import NOOP, Topology
from esper.leyline.stages import STYLE_SPECS, AlphaAlgorithm, AlphaCurve, BlendStyle

E = TypeVar("E", bound=IntEnum)


def make_command(
    op: LifecycleOp,
    slot: int,
    *,
    blueprint: int = NOOP,
    style: BlendStyle | None = None,
    tempo: int = 5,
    target: float = 1.0,
    speed: int = 0,
    curve: AlphaCurve = AlphaCurve.LINEAR,
) -> Command:
    """Return a one-row command with these values."""
    spec = STYLE_SPECS[BlendStyle(PLACEHOLDERS["style"]) if style is None else style]

    def whole(value: int) -> torch.Tensor:
        return torch.tensor([int(value)], dtype=torch.int64)

    return Command(
        op=whole(op),
        slot=whole(slot),
        blueprint=whole(blueprint),
        algorithm=whole(spec.algorithm),
        ramp=whole(spec.curve),
        tempo=whole(tempo),
        target=torch.tensor([float(target)], dtype=torch.float64),
        speed=whole(speed),
        curve=whole(curve),
    )


def parse_choice(kind: type[E], value: str | E, what: str) -> E:
    """Return the member of an enum by name (any case) or by itself."""
    if isinstance(value, kind):
        return value
    names = {member.name.lower(): member for member in kind}
    if not isinstance(value, str):
        raise UsageError(f"{what} must be one of {', '.join(names)}, got {value!r}")
    try:
        return names[value.lower()]
    except KeyError:
        raise unknown_name(what, value, names) from None


def check_immediate(
    blueprint: Blueprint, topology: Topology, style: BlendStyle, immediate: bool
) -> None:
    """Refuse a seed at full amplitude from the first step that cannot be so."""
    if not immediate:
        return
    if not blueprint.can_be_immediate(topology):
        raise UsageError(
            f"a {blueprint.name!r} seed changes the activation from its first step, so it has to "
            "be blended in; leave immediate=True out, or choose a blueprint that starts as the "
            "identity (`esper blueprints`)"
        )
    if STYLE_SPECS[style].algorithm is not AlphaAlgorithm.ADD:
        raise UsageError(
            f"style {style.name.lower()!r} is a way to blend a seed in, and a {blueprint.name!r} "
            "seed here is at full amplitude from the first step; leave the style out, or write "
            "immediate=False"
        )
