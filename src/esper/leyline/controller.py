"""The one protocol every controller implements, learned or not."""

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

# ---- Durations that are meant for a run of 60 epochs or more, fitted into a shorter one


REFERENCE_HORIZON = 60
"""Epochs of a run in which durations are as they are written."""


CALM_SHARE = 0.5
"""In a run of less than this share of the shortest that a policy learned in, it has to hurry."""

LEAST_SHARE = 0.3
"""A run of less than this share of the shortest that a policy learned in is strange to it.

The one that ships learned in 40 epochs or more. In less than 12 it germinates, if at all, too late
for a seed to be blended in wholly, however it hurries (docs/log.md).
"""


def is_strange(horizon: int, learned: int) -> bool:
    """Return whether a run is much shorter than those that a policy learned in; 0: unknown."""
    return horizon < LEAST_SHARE * learned


def pace(horizon: int) -> float:
    """Return how many times as fast a run of this length has to be, 1 for long ones."""
    return max(1.0, REFERENCE_HORIZON / max(1, horizon))


def shortened(epochs: int, horizon: int) -> int:
    """Return a duration in proportion to the run: at least one epoch, and none stays none."""
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
