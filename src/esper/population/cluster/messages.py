"""What travels between a program and the actors of its cluster."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.population.cluster.packing import Packed, pack, unpack
from esper.population.engine import PopulationConfig, Strategy
from esper.tasks.task import Task, TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """All that an actor needs to know to have a population of some rows."""

    tasks: Sequence[tuple[type[Task], TaskConfig]]
    """What rows are of; classes travel by name."""
    rows: Sequence[int]
    """How many of every task."""
    num_slots: int
    """Slots of the row with the most of them, be it here or in another actor."""
    seed: int
    strategy: Strategy
    data: str | None
    """Where data files lie on the actor's machine; the usual places if None."""
    fingerprints: Mapping[Hashable, str]
    """By splits: the checksum of the program's data, which the actor's must have."""
    blueprints: tuple[str, ...]
    """What the program has registered, in its order."""
    config: PopulationConfig


@dataclass(frozen=True, slots=True)
class Lived:
    """What an actor answers after an epoch of its rows."""

    seen: Packed
    """Signals and panics."""
    view: Packed
    """What legality depends on."""
    seconds: float
    """How long the rows took there, without packing."""
    processor_seconds: float
    """Time that the process had the processor for them."""
    warnings: tuple[str, ...]
    """What was warned of for the first time."""

    @classmethod
    def pack(
        cls,
        signals: Signals,
        panics: Tensor,
        view: RuleView,
        spent: tuple[float, float],
        warnings: tuple[str, ...] = (),
    ) -> Lived:
        """Return the answer; `spent` is by the clock and by the processor."""
        seen = {**signals.state_dict(), _PANICS: panics}
        return cls(pack(seen), pack(view.state_dict()), *spent, warnings)

    @staticmethod
    def unpack(
        parts: Sequence[Lived], order: Sequence[int], device: torch.device
    ) -> tuple[Signals, Tensor, RuleView]:
        """Return signals and panics on a device, and the view: row r is row order[r] of the parts.

        As in a population of this process, the view is not on the device.
        """
        seen = unpack([part.seen for part in parts], order, device)
        panics = seen.pop(_PANICS)
        view = unpack([part.view for part in parts], order)
        return Signals(**seen), panics, RuleView(**view)


ACTIONS = "actions"
"""Name of what is packed for a step: int64 [R, heads], one column for each of `HEAD_NAMES`."""

_PANICS = "panics"
