"""What travels between a program and the actors of its cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.population.engine import PopulationConfig, Strategy
from esper.tasks.task import Task, TaskConfig

Arrays = Mapping[str, NDArray[Any]]
"""Tensors by name, as arrays: Ray hands those over without copying."""

T = TypeVar("T", Signals, RuleView)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """All that an actor needs to know to have a population of some rows."""

    tasks: Sequence[tuple[type[Task], TaskConfig]]
    """What rows are of; classes travel by name."""
    rows: Sequence[int]
    """How many of every task."""
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

    signals: Arrays
    view: Arrays
    panics: NDArray[np.int64]
    seconds: float
    """How long it took there."""
    processor_seconds: float
    """Time that the process had the processor for it."""


def pack(record: Signals | RuleView) -> Arrays:
    """Return a record of tensors as arrays."""
    return {
        field.name: getattr(record, field.name).cpu().numpy()
        for field in dataclasses.fields(record)
    }


def unpack(kind: type[T], parts: Sequence[Arrays], order: Tensor) -> T:
    """Return one record of the rows of several; row r is row order[r] of the parts in turn."""
    joined = {
        name: torch.from_numpy(np.concatenate([part[name] for part in parts]))[order]
        for name in parts[0]
    }
    return kind(**joined)
