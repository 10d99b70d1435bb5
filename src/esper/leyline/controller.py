"""The controller protocol, and the constants of controllers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, BlueprintKind, kinds_of

# ---- Durations are written for runs of 60 epochs or more, and scaled down for shorter ones


REFERENCE_HORIZON = 60
"""Epochs from which on durations are not scaled down."""


CALM_SHARE = 0.5
"""A policy hurries in runs shorter than this share of the shortest runs it was trained on."""

LEAST_SHARE = 0.3
"""Runs shorter than this share of the shortest runs a policy was trained on are too short for it.

The shipped policy was trained on 40 epochs or more. In fewer than 12 it germinates too late for a
seed to be fully blended in, even when it hurries (research/log.md).
"""


def is_too_short(horizon: int, learned: int) -> bool:
    """Return whether a run is too short for a policy trained on `learned` epochs; 0 is unknown."""
    return horizon < LEAST_SHARE * learned


def pace(horizon: int) -> float:
    """Return the factor by which durations are divided in a run of this length, 1 or more."""
    return max(1.0, REFERENCE_HORIZON / max(1, horizon))


def shortened(epochs: int, horizon: int) -> int:
    """Return a duration scaled to the run: at least one epoch, but 0 stays 0."""
    return min(epochs, max(1, round(epochs / pace(horizon))))


# ---- Constants of the learned controller that the design documents fix by name


DEFAULT_EPISODE_LENGTH = 150
DEFAULT_LSTM_HIDDEN_DIM = 512
DEFAULT_FEATURE_DIM = 512
DEFAULT_GAMMA = 0.995

_PER_HEAD: dict[str, tuple[float, float, float, float]] = {
    # Head: multiplier of its entropy, least entropy, penalty below that, least probability.
    "slot": (1.0, 0.20, 0.15, 0.03),
    "blueprint": (1.3, 0.40, 0.50, 0.10),
    "style": (1.2, 0.30, 0.20, 0.05),
    "tempo": (1.3, 0.40, 0.50, 0.10),
    "alpha_target": (1.2, 0.25, 0.15, 0.05),
    "alpha_speed": (1.2, 0.20, 0.12, 0.05),
    "alpha_curve": (1.2, 0.20, 0.12, 0.05),
    "op": (1.0, 0.15, 0.05, 0.02),
}

ENTROPY_COEF_PER_HEAD = {head: constants[0] for head, constants in _PER_HEAD.items()}
"""Multiplier of each head's entropy in the bonus."""

ENTROPY_FLOOR_PER_HEAD = {head: constants[1] for head, constants in _PER_HEAD.items()}
"""Normalised entropy below which a head is penalised."""

ENTROPY_FLOOR_PENALTY_COEF = {head: constants[2] for head, constants in _PER_HEAD.items()}
"""Weight of that penalty."""

PROBABILITY_FLOOR_PER_HEAD = {head: constants[3] for head, constants in _PER_HEAD.items()}
"""Least probability of a valid choice while exploring."""


@runtime_checkable
class Controller(Protocol):
    """Decides what to grow, once per epoch and row."""

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
    """Largest size of a grown network as a multiple of its host's; None is no limit."""

    parameters: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        """Refuse limits below the host itself."""
        for name in ("parameters", "flops"):
            limit = getattr(self, name)
            if limit is not None and not 1.0 <= limit < math.inf:
                raise UsageError(f"a limit on {name} must be at least 1, got {limit!r}")


@runtime_checkable
class Limited(Protocol):
    """A controller that was trained under limits on growth."""

    @property
    def limits(self) -> GrowthLimits:
        """Return the limits that apply unless the user sets others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerContext:
    """What a controller is built for: slots, blueprints, and the seed of the run."""

    slot_names: tuple[str, ...]
    """Name of every slot, in action order."""
    blueprint_names: tuple[str, ...] = field(default=BUILTIN_BLUEPRINTS)
    """Name of every blueprint at the index that is its id."""
    blueprint_kinds: tuple[BlueprintKind, ...] = ()
    """Their kinds; by default those of built-in blueprints, and 'other' for the rest."""
    copies: tuple[str, ...] = ()
    """Blueprints whose seeds are copies of the host's blocks."""
    seed: int = 0
    """Seed of the run, for controllers that draw random numbers."""
    inert_epochs: int = 0
    """Epochs before a new seed can be blended in; 0 if not known."""
    immediate: tuple[tuple[bool, ...], ...] = ()
    """Whether a seed is at full amplitude from the first step, by slot and blueprint; empty: none
    is."""

    def __post_init__(self) -> None:
        """Check that there is one kind for every blueprint."""
        if self.blueprint_kinds and len(self.blueprint_kinds) != len(self.blueprint_names):
            raise UsageError(
                f"{len(self.blueprint_names)} blueprints need as many kinds, "
                f"got {len(self.blueprint_kinds)}"
            )

    def is_immediate(self, slot: int, blueprint: int) -> bool:
        """Return whether a new seed there is at full amplitude from the first step."""
        known = self.immediate[slot] if self.immediate else ()
        return blueprint < len(known) and known[blueprint]

    def inert_epochs_of(self, slot: int, blueprint: int) -> int:
        """Return the epochs before a new seed there takes part in the network's outputs."""
        return 0 if self.is_immediate(slot, blueprint) else self.inert_epochs

    def find_blueprints(self, names: Sequence[str]) -> list[int]:
        """Return the ids of blueprints by name, or raise if one is not known."""
        for name in names:
            if name not in self.blueprint_names:
                raise unknown_name("blueprint", name, self.blueprint_names)
        return [self.blueprint_names.index(name) for name in names]

    @property
    def kinds(self) -> tuple[BlueprintKind, ...]:
        """The kind of every blueprint."""
        return self.blueprint_kinds or kinds_of(self.blueprint_names)
