"""What belongs to the tasks of a population: their rows, their data and the blueprints that fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names, selectable
from esper.leyline.errors import UsageError
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task


def load_data(
    tasks: Sequence[Task], data: str | Path | Sequence[TaskData] | None, device: torch.device
) -> list[TaskData]:
    """Return the data of every task on the device."""
    if data is None or isinstance(data, str | Path):
        return [task.load(data, device=device) for task in tasks]
    if len(data) != len(tasks):
        raise UsageError(f"{len(tasks)} tasks need as many data sets, got {len(data)}")
    return [each.to(device) for each in data]


def fitting_blueprints(task: Task) -> Tensor:
    """Return bool [S, B]: the blueprints that may be germinated in each slot of a task."""
    fits = torch.zeros((len(task.slot_paths), len(blueprint_names())), dtype=torch.bool)
    fits[:, list(selectable(task.topology))] = True
    return fits


def share_out(rows: int | Sequence[int], tasks: int) -> list[int]:
    """Return how many rows every task gets: as asked for, or all alike and the first ones more."""
    counts = (
        list(rows)
        if not isinstance(rows, int)
        else [rows // tasks + (index < rows % tasks) for index in range(tasks)]
    )
    if len(counts) != tasks or min(counts, default=0) < 1:
        raise UsageError(f"every one of {tasks} tasks needs at least one row, got rows={rows!r}")
    return counts
