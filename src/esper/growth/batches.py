"""A task's data as batches: training order named by seed and epoch, validation in fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from esper.leyline.randomness import generator
from esper.tasks.dataset import TaskData
from esper.tasks.splits import Split


class TrainingBatches:
    """One epoch of training batches after another; each epoch depends on its number alone."""

    def __init__(self, data: TaskData, batch_size: int, seed: int) -> None:
        """Serve `samples_per_step` samples per epoch."""
        self._data = data
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch the next iteration is."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-self._data.samples_per_step // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._data.order(self._seed, 0, self._epoch)
        augment = generator(self._seed, 0, self._epoch, "augment")
        for indices in order.split(self._batch_size):
            yield self._data.batch("train", indices, augment)


class FixedBatches:
    """The same samples in the same order each time."""

    def __init__(
        self, data: TaskData, split: Split, *, subset: bool = False, batch_size: int = 256
    ) -> None:
        """Serve a whole split, or the fixed validation subset used while growing."""
        whole = torch.arange(data.size(split), device=data.device)
        self._indices = data.subset if subset else whole
        self._data = data
        self._split: Split = split
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._indices.split(self._batch_size):
            yield self._data.batch(self._split, indices)
