"""What a row is a network for, and which rows are one stack.

Rows of one `StackKey` run together whatever their conditions are: which data of that shape,
how much of it and how noisy, at which rates, to which horizon. All of that are values of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from esper.leyline.config import Config
from esper.leyline.grouping import grouped
from esper.tasks.data.source import Kind
from esper.tasks.dataset import TaskData
from esper.tasks.objective import ObjectiveName
from esper.tasks.task import Task
from esper.tasks.training import OptimizerName


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A task and its data: all that a row trains under."""

    task: Task
    data: TaskData

    @property
    def horizon(self) -> int:
        """Epochs of an episode; the row rests after the last of them."""
        return self.task.config.horizon


@dataclass(frozen=True, slots=True)
class StackKey:
    """What rows must agree in to be one stack: shapes, and what one step of them does."""

    builder: Callable[..., Any]
    """What builds the host; tasks share it unless they build hosts of their own."""
    host: str
    host_options: Config
    input_shape: tuple[int, ...]
    num_classes: int | None
    objective: ObjectiveName
    batch_size: int
    samples_per_step: int
    optimizer: OptimizerName
    validation_samples: int
    kind: Kind
    stored: torch.dtype
    """Type of the samples as they are stored."""

    @classmethod
    def of(cls, condition: Condition) -> StackKey:
        """Return the architecture of a row under this condition."""
        task, data = condition.task, condition.data
        config = task.config
        return cls(
            builder=type(task).build_host,
            host=config.host,
            host_options=config.host_options,
            input_shape=config.input_shape,
            num_classes=config.num_classes,
            objective=config.objective,
            batch_size=config.batch_size,
            samples_per_step=data.samples_per_step,
            optimizer=config.optimizer,
            validation_samples=len(data.subset),
            kind=data.kind,
            stored=data.splits.samples["train"].dtype,
        )


@dataclass(frozen=True, slots=True)
class Roster:
    """Which row is under which condition, and which rows run together."""

    conditions: tuple[Condition, ...]
    """One for every task."""
    task_of_row: tuple[int, ...]
    """Which of them each row is under; rows come task by task."""
    architectures: dict[StackKey, list[int]]
    """The rows of every architecture, in the order in which they first come."""

    @classmethod
    def of(cls, conditions: Sequence[Condition], task_of_row: Sequence[int]) -> Roster:
        """Return the roster of rows under these conditions."""
        known = [StackKey.of(condition) for condition in conditions]
        found = grouped((known[index], row) for row, index in enumerate(task_of_row))
        return cls(tuple(conditions), tuple(task_of_row), found)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.task_of_row)

    def condition(self, row: int) -> Condition:
        """Return what a row trains under."""
        return self.conditions[self.task_of_row[row]]

    def take(self, rows: Sequence[int]) -> tuple[Roster, list[int]]:
        """Return the roster of some of the rows, and which they are in its order, task by task."""
        chosen = sorted(rows, key=lambda row: self.task_of_row[row])
        kept = sorted({self.task_of_row[row] for row in chosen})
        conditions = [self.conditions[index] for index in kept]
        return Roster.of(conditions, [kept.index(self.task_of_row[row]) for row in chosen]), chosen


def divide(rows: Sequence[int], most: int) -> list[list[int]]:
    """Return rows in as few parts of at most `most` as there can be, equal but for one row."""
    parts = -(-len(rows) // most)
    return [part.tolist() for part in np.array_split(rows, parts)]
