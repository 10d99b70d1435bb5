"""`DataShelf`: the data of many tasks, each source read once and in memory once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

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

    def load(self, task: Task) -> TaskData:
        """Return what a task trains on; its source is read if no other task's was the same."""
        if task.splits_key not in self._splits:
            if task.source_key not in self._sources:
                self._sources[task.source_key] = task.read(self._path)
            source = self._sources[task.source_key]
            self._splits[task.splits_key] = task.split(source, self._device)
        return task.choose(self._splits[task.splits_key])

    def forget_all_but(self, tasks: Iterable[Task]) -> None:
        """Keep only what these tasks use."""
        needed = list(tasks)
        sources, splits = ({t.source_key for t in needed}, {t.splits_key for t in needed})
        self._sources = {key: value for key, value in self._sources.items() if key in sources}
        self._splits = {key: value for key, value in self._splits.items() if key in splits}
