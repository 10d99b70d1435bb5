"""What every row trains on: order and augmentation drawn per row, in tensors that stay in place.

`EpochSampler` draws an epoch of all rows ahead, `BatchBuffers` holds one batch of it where a
captured step reads it. Both serve `StackedEngine`; the sequential engine draws the same samples row
by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.randomness import generator
from esper.population.vmap_rules import has_kernels
from esper.tasks.dataset import Crops, TaskData, crop_flip, draw_crops


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


class EpochSampler:
    """Draws the epochs of a fixed set of rows."""

    def __init__(self, data: TaskData, keys: Sequence[int], batch_size: int) -> None:
        """Serve rows with these keys."""
        self._data = data
        self._keys = list(keys)
        self._batch_size = batch_size
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sampler")
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


class BatchBuffers:
    """Inputs x [R, B, ...] and targets y [R, B, ...] of one batch."""

    def __init__(self, data: TaskData, compute: torch.dtype) -> None:
        """Serve batches of this data; real inputs have the precision `compute`."""
        self._data = data
        self._compute = compute
        self._normalisation = _normalisation_per_channel(data, compute)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.x = self.y = torch.zeros(0)

    def load(self, plan: EpochPlan, start: int, stop: int) -> None:
        """Take over some samples of an epoch; batches of one size use the same memory."""
        if self._normalisation is not None:
            self._load_images(plan, start, stop, *self._normalisation)
            return
        x, y = plan.batch(self._data, start, stop)
        x = x.to(self._compute) if x.is_floating_point() else x
        if stop - start not in self._buffers:
            self._buffers[stop - start] = x.clone(), y.clone()
        self.x, self.y = self._buffers[stop - start]
        self.x.copy_(x)
        self.y.copy_(y)

    def _load_images(
        self, plan: EpochPlan, start: int, stop: int, gain: Tensor, bias: Tensor
    ) -> None:
        from esper.population.kernels.images import sample_images

        images, labels = self._data.samples["train"], self._data.targets["train"]
        rows, (_, channels, height, width) = len(plan.indices), images.shape
        if stop - start not in self._buffers:
            shape = (rows, stop - start, height, width, _padded(channels))
            self._buffers[stop - start] = (
                torch.zeros(shape, dtype=self._compute, device=images.device),
                torch.zeros(shape[:2], dtype=labels.dtype, device=images.device),
            )
        pixels, self.y = self._buffers[stop - start]
        self.x = pixels[..., :channels].movedim(-1, 2)
        sample_images(images, labels, plan.indices, plan.crops, gain, bias, start, pixels, self.y)


def order_images(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] in the memory order kernels want, where there are kernels."""
    if not has_kernels(x) or x.dim() != 4:
        return x
    channels = x.shape[1]
    pixels = F.pad(x.movedim(1, -1), (0, _padded(channels) - channels)).contiguous()
    return pixels[..., :channels].movedim(-1, 1)


def _padded(channels: int) -> int:
    return 1 << (channels - 1).bit_length()


def _normalisation_per_channel(
    data: TaskData, compute: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Return gain and bias [C] if a kernel can make batches of this data."""
    if data.kind != "image" or not has_kernels(data.subset.new_zeros(0, dtype=compute)):
        return None
    if data.objective != "classification" or data.samples["train"].dim() != 4:
        return None
    channels, device = data.samples["train"].shape[1], data.device
    gain = torch.ones(1, device=device) if data.gain is None else data.gain.flatten()
    bias = torch.zeros(1, device=device) if data.bias is None else data.bias.flatten()
    if gain.numel() not in (1, channels) or bias.numel() not in (1, channels):
        return None
    return gain.expand(channels).contiguous(), bias.expand(channels).contiguous()
