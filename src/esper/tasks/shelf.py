"""`DataShelf`: the data of many tasks, each source read once.

Members of a family differ in which training samples and labels they have; what they are judged on
is the same. So a source stays in memory as it was read, and tasks that carve the same validation
and test splits from it share those tensors.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from esper.tasks.data.source import Source
from esper.tasks.dataset import Split, TaskData
from esper.tasks.task import DataPath, Task

_Tensors = dict[Split, Tensor]


class DataShelf:
    """Prepares the data of tasks.

    Args:
        data_path: where data files lie; None for the usual places.
        device: where the tensors go.
    """

    def __init__(self, data_path: DataPath | None, device: torch.device | str) -> None:
        """Start empty."""
        self._path, self._device = data_path, device
        self._sources: dict[object, Source] = {}
        self._judged: dict[object, tuple[_Tensors, _Tensors]] = {}

    def load(self, task: Task) -> TaskData:
        """Return the data of a task; what is read or judged on may be shared with other tasks."""
        config = task.config
        # The length of a text's sequences is part of how it is read.
        read = (type(task), config.input_shape)
        if read not in self._sources:
            self._sources[read] = task.read(self._path)
        data = task.prepare(self._sources[read], self._device)
        carved = (read, config.classes, config.val_fraction, config.test_fraction)
        samples, targets = self._judged.setdefault(
            carved, (_judged(data.samples), _judged(data.targets))
        )
        return dataclasses.replace(
            data, samples={**data.samples, **samples}, targets={**data.targets, **targets}
        )


def _judged(tensors: _Tensors) -> _Tensors:
    """Return the splits that a network is judged on."""
    return {split: tensor for split, tensor in tensors.items() if split != "train"}
