"""The one protocol every controller implements, learned or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.blueprints import BUILTIN_BLUEPRINTS, BlueprintKind, kinds_of
from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals


@runtime_checkable
class Controller(Protocol):
    """Decides, once per epoch and row, what to grow."""

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Forget everything and prepare for `rows` rows."""

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return one legal action per row: {head: int64[R]} for every head."""

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain data and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLimits:
    """Most that a network may grow to, in units of its host's; None where there is no limit."""

    parameters: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no network could be within."""
        for name in ("parameters", "flops"):
            limit = getattr(self, name)
            if limit is not None and not 1.0 <= limit < math.inf:
                raise UsageError(f"a limit on {name} must be at least 1, got {limit!r}")


@runtime_checkable
class Limited(Protocol):
    """A controller that learned under limits on growth, and knows nothing of life without them."""

    @property
    def limits(self) -> GrowthLimits:
        """Return what holds where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerContext:
    """What a controller may know about the place it will work in when it is built."""

    slot_names: tuple[str, ...]
    """Name of every slot, in action order."""
    blueprint_names: tuple[str, ...] = field(default=BUILTIN_BLUEPRINTS)
    """Name of every blueprint at the index that is its id."""
    blueprint_kinds: tuple[BlueprintKind, ...] = ()
    """Their kinds; by default what is known by name, and 'other' for the rest."""
    copies: tuple[str, ...] = ()
    """Blueprints whose seeds are copies of the host's blocks; kind and cost do not tell that."""
    seed: int = 0
    """Seed of the run, for controllers that draw."""
    inert_epochs: int = 0
    """Epochs that a new seed lives through before it can be blended in; 0 where nobody knows."""

    def __post_init__(self) -> None:
        """Refuse kinds of other blueprints."""
        if self.blueprint_kinds and len(self.blueprint_kinds) != len(self.blueprint_names):
            raise UsageError(
                f"{len(self.blueprint_names)} blueprints need as many kinds, "
                f"got {len(self.blueprint_kinds)}"
            )

    def find_blueprints(self, names: Sequence[str]) -> list[int]:
        """Return the ids of blueprints, or raise where one is not known."""
        for name in names:
            if name not in self.blueprint_names:
                raise unknown_name("blueprint", name, self.blueprint_names)
        return [self.blueprint_names.index(name) for name in names]

    @property
    def kinds(self) -> tuple[BlueprintKind, ...]:
        """The kind of every blueprint."""
        return self.blueprint_kinds or kinds_of(self.blueprint_names)
