"""The batches of a stacked group of rows, in tensors that stay where they are.

A captured step reads its inputs from the same memory every time. On a device images are put there
by one kernel, in the order in which convolutions read them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.population.feed import EpochPlan
from esper.population.shortcuts import has_kernels
from esper.tasks.dataset import TaskData


class Inputs:
    """Inputs x [R, B, ...] and targets y [R, B, ...] of one batch."""

    def __init__(self, data: TaskData, compute: torch.dtype) -> None:
        """Serve batches of this data; real inputs have the precision `compute`."""
        self._data = data
        self._compute = compute
        self._normalisation = _normalisation_per_channel(data, compute)
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.x = self.y = torch.zeros(0)

    def load(self, plan: EpochPlan, start: int, stop: int) -> None:
        """Take over some samples of an epoch; batches of one size use the same memory."""
        if self._normalisation is not None:
            self._load_images(plan, start, stop, *self._normalisation)
            return
        x, y = plan.batch(self._data, start, stop)
        x = x.to(self._compute) if x.is_floating_point() else x
        if stop - start not in self._memory:
            self._memory[stop - start] = x.clone(), y.clone()
        self.x, self.y = self._memory[stop - start]
        self.x.copy_(x)
        self.y.copy_(y)

    def _load_images(
        self, plan: EpochPlan, start: int, stop: int, gain: Tensor, bias: Tensor
    ) -> None:
        from esper.population.kernels.sampling import sample_images

        images, labels = self._data.samples["train"], self._data.targets["train"]
        rows, (_, channels, height, width) = len(plan.indices), images.shape
        if stop - start not in self._memory:
            shape = (rows, stop - start, height, width, _padded(channels))
            self._memory[stop - start] = (
                torch.zeros(shape, dtype=self._compute, device=images.device),
                torch.zeros(shape[:2], dtype=labels.dtype, device=images.device),
            )
        pixels, self.y = self._memory[stop - start]
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
