"""`DataShelf`: the data of many tasks, each source read once and in memory once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from esper.tasks.data.source import Source
from esper.tasks.dataset import TaskData
from esper.tasks.splits import Splits
from esper.tasks.task import DataPath, Task


class DataShelf:
    """The data of tasks on one device.

    Tasks that differ in what they use of a source, or in how they train on it, share its splits;
    tasks that split it in other ways share what was read.
    """

    def __init__(
        self, data_path: DataPath | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Read from this path, or from where each source usually lies; nothing is read yet."""
        self._path, self._device = data_path, device
        self._sources: dict[Hashable, Source] = {}
        self._splits: dict[Hashable, Splits] = {}
        self._data: dict[Hashable, TaskData] = {}

    def load(self, task: Task) -> TaskData:
        """Return what a task trains on; its source is read if no other task's was the same."""
        if task.data_key not in self._data:
            self._data[task.data_key] = task.choose(self._load_splits(task))
        return self._data[task.data_key]

    def forget_all_but(self, tasks: Iterable[Task]) -> None:
        """Keep only what these tasks use."""
        needed = list(tasks)
        _keep(self._sources, {task.source_key for task in needed})
        _keep(self._splits, {task.splits_key for task in needed})
        _keep(self._data, {task.data_key for task in needed})

    def _load_splits(self, task: Task) -> Splits:
        if task.splits_key not in self._splits:
            if task.source_key not in self._sources:
                self._sources[task.source_key] = task.read(self._path)
            source = self._sources[task.source_key]
            self._splits[task.splits_key] = task.split(source, self._device)
        return self._splits[task.splits_key]


def _keep(shelf: dict[Hashable, Any], keys: set[Hashable]) -> None:
    for key in shelf.keys() - keys:
        del shelf[key]
