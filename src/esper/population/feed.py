"""What every row trains on: sample order and augmentation, drawn per row from named streams.

A row's epoch depends on its own key and on the number of the epoch alone, never on how many rows
there are or what they do. The next epoch of all rows is drawn in the background while the present
one trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.randomness import generator
from esper.tasks.augment import Crops, crop_flip, draw_crops
from esper.tasks.dataset import TaskData


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch of some rows; tensors [R, samples] on the data's device."""

    indices: Tensor
    crops: Crops | None

    def batch(self, data: TaskData, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return inputs [R, B, ...] and targets [R, B, ...] of some of the samples."""
        indices = self.indices[:, start:stop]
        crops = None
        if self.crops is not None:
            crops = Crops(
                self.crops.top[:, start:stop],
                self.crops.left[:, start:stop],
                self.crops.is_flipped[:, start:stop],
            )
        return gather_batch(data, indices, crops)


def gather_batch(data: TaskData, indices: Tensor, crops: Crops | None) -> tuple[Tensor, Tensor]:
    """Return the training samples at `indices` [R, B], cropped and flipped as drawn."""
    x = data.samples["train"][indices]
    if data.kind == "tokens":
        tokens = x.long()
        return tokens[..., :-1], tokens[..., 1:]
    if crops is not None:
        flat = Crops(crops.top.flatten(), crops.left.flatten(), crops.is_flipped.flatten())
        x = crop_flip(x.flatten(0, 1), flat).reshape(x.shape)
    x = x.float()
    if data.gain is not None and data.bias is not None:
        x = x * data.gain + data.bias
    return x, data.targets["train"][indices]


class Feed:
    """Draws the epochs of a fixed set of rows."""

    def __init__(self, data: TaskData, keys: Sequence[int], batch_size: int) -> None:
        """Serve rows with these keys."""
        self._data = data
        self._keys = list(keys)
        self._batch_size = batch_size
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="feed")
        self._ahead: tuple[tuple[int, ...], Future[EpochPlan]] | None = None

    def epoch(self, numbers: Sequence[int]) -> EpochPlan:
        """Return the epoch each row is at, and start drawing the one after it."""
        wanted = tuple(numbers)
        if self._ahead is not None and self._ahead[0] == wanted:
            plan = self._ahead[1].result()
        else:
            plan = self._draw(wanted)
        following = tuple(number + 1 for number in wanted)
        self._ahead = (following, self._pool.submit(self._draw, following))
        return plan

    def close(self) -> None:
        """Stop drawing."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _draw(self, numbers: tuple[int, ...]) -> EpochPlan:
        orders, crops = [], []
        for key, number in zip(self._keys, numbers, strict=True):
            orders.append(self._data.order(key, 0, number).cpu())
            if self._data.augmentation != "none":
                crops.append(draw_epoch_crops(self._data, key, number, self._batch_size))
        device = self._data.device
        stacked = None
        if crops:
            stacked = Crops(
                torch.stack([c.top for c in crops]).to(device),
                torch.stack([c.left for c in crops]).to(device),
                torch.stack([c.is_flipped for c in crops]).to(device),
            )
        return EpochPlan(torch.stack(orders).to(device), stacked)


def draw_epoch_crops(data: TaskData, key: int, epoch: int, batch_size: int) -> Crops:
    """Draw one row's crops for an epoch, batch by batch, as a single network would draw them."""
    stream = generator(key, 0, epoch, "augment")
    total = data.samples_per_step
    parts = [
        draw_crops(min(batch_size, total - start), stream) for start in range(0, total, batch_size)
    ]
    return Crops(
        torch.cat([part.top for part in parts]),
        torch.cat([part.left for part in parts]),
        torch.cat([part.is_flipped for part in parts]),
    )
