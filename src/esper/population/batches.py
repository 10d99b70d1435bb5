"""What every row trains on: order and augmentation drawn per row, in tensors that stay in place.

`RowSamples` knows the data of every row of a stack, whose samples lie in one tensor. `EpochSampler`
draws an epoch of all rows ahead, `BatchBuffers` holds one batch of it where a captured step reads
it. All serve `StackedEngine`; the sequential engine draws the same samples row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.randomness import generator
from esper.population.vmap_rules import has_kernels
from esper.tasks.augmentation import PADDING, Crops, crop_flip, draw_crops
from esper.tasks.dataset import TaskData
from esper.tasks.splits import Splits


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch of some rows; tensors [R, samples, ...] on the data's device."""

    indices: Tensor
    """int64, where samples lie in `RowSamples.stored`."""
    targets: Tensor | None
    """Their targets, as each row has them; None for tokens."""
    crops: Crops | None


class RowSamples:
    """The training samples of the rows of a stack.

    Each source lies in `stored` once, however many rows use how much of it. Rows have targets,
    normalisation and augmentation of their own.
    """

    def __init__(self, data: Sequence[TaskData], keys: Sequence[int], batch_size: int) -> None:
        """Serve rows with this data and these keys."""
        self._data, self._keys, self._batch_size = list(data), list(keys), batch_size
        self._has_crops = any(each.augmentation != "none" for each in data)
        self.device = data[0].device
        sources = {id(each.splits): each.splits for each in data}
        firsts, first = {}, 0
        for name, splits in sources.items():
            firsts[name] = first
            first += len(splits.samples["train"])
        self._first = [firsts[id(each.splits)] for each in data]
        alone = next(iter(sources.values())).samples["train"]
        self.stored: Tensor = (
            alone
            if len(sources) == 1
            else torch.cat([splits.samples["train"] for splits in sources.values()])
        )
        """Samples of all sources, one after another."""
        self.gain, self.bias = stack_normalisation([each.splits for each in data])
        """Float32 [R, ...], broadcastable to samples; None where none has any."""
        # Rows draw on the CPU, where their targets are looked up too.
        at_hand = {id(t): t.cpu() for each in data if (t := each.train_targets) is not None}
        self._targets = [at_hand.get(id(each.train_targets)) for each in data]

    @cached_property
    def channel_normalisation(self) -> tuple[Tensor, Tensor] | None:
        """Gain and bias [R, C] if these are images that are normalised channel by channel."""
        if self._data[0].kind != "image":
            return None
        rows, channels = len(self._data), self.stored.shape[1]
        if self.gain is None or self.bias is None:
            one = torch.ones((rows, channels), device=self.device)
            return one, torch.zeros_like(one)
        if self.gain.shape[1:] not in ((1,), (1, 1, 1), (channels, 1, 1)):
            return None
        wide = (rows, channels)
        return (
            self.gain.reshape(rows, -1).expand(wide).contiguous(),
            self.bias.reshape(rows, -1).expand(wide).contiguous(),
        )

    def draw(self, epochs: Sequence[int]) -> EpochPlan:
        """Draw the epoch that each row is at."""
        orders, targets, crops = [], [], []
        for row, epoch in enumerate(epochs):
            data, key, own = self._data[row], self._keys[row], self._targets[row]
            order = data.order(key, 0, epoch)
            orders.append(order + self._first[row])
            if own is not None:
                targets.append(own[order])
            if self._has_crops:
                crops.append(draw_epoch_crops(data, key, epoch, self._batch_size))
        stacked = None
        if crops:
            stacked = Crops(
                torch.stack([c.top for c in crops]).to(self.device),
                torch.stack([c.left for c in crops]).to(self.device),
                torch.stack([c.is_flipped for c in crops]).to(self.device),
            )
        return EpochPlan(
            torch.stack(orders).to(self.device),
            torch.stack(targets).to(self.device) if targets else None,
            stacked,
        )

    def gather(self, plan: EpochPlan, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return inputs [R, B, ...] and targets [R, B, ...] of some of an epoch's samples."""
        x = self.stored[plan.indices[:, start:stop]]
        if plan.targets is None:
            tokens = x.long()
            return tokens[..., :-1], tokens[..., 1:]
        if plan.crops is not None:
            part = take_crops(plan.crops, (slice(None), slice(start, stop)))
            flat = Crops(part.top.flatten(), part.left.flatten(), part.is_flipped.flatten())
            x = crop_flip(x.flatten(0, 1), flat).reshape(x.shape)
        x = x.float()
        if self.gain is not None and self.bias is not None:
            x = x * self.gain[:, None] + self.bias[:, None]
        return x, plan.targets[:, start:stop]


def stack_normalisation(splits: Sequence[Splits]) -> tuple[Tensor | None, Tensor | None]:
    """Return gain and bias [R, ...] of rows; a row without any is left as it is."""
    if all(each.gain is None for each in splits):
        return None, None
    gains = [torch.ones(1) if each.gain is None else each.gain for each in splits]
    biases = [torch.zeros(1) if each.bias is None else each.bias for each in splits]
    shape = torch.broadcast_shapes(*{tensor.shape for tensor in (*gains, *biases)})
    device = splits[0].device

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        # Most rows share their tensors: each is expanded once.
        wide = {id(tensor): tensor.to(device).expand(shape) for tensor in tensors}
        return torch.stack([wide[id(tensor)] for tensor in tensors])

    return stack(gains), stack(biases)


def gather_batch(data: TaskData, indices: Tensor, crops: Crops | None) -> tuple[Tensor, Tensor]:
    """Return one row's training samples at `indices` [B], cropped and flipped as drawn."""
    indices = indices.to(data.device)
    if crops is None or data.kind == "tokens":
        return data.batch("train", indices)
    assert data.train_targets is not None, "images have labels or values"
    x = crop_flip(data.splits.samples["train"][indices], crops).float()
    if data.splits.gain is not None and data.splits.bias is not None:
        x = x * data.splits.gain + data.splits.bias
    return x, data.train_targets[indices]


class EpochSampler:
    """Draws the epochs of a fixed set of rows, the next one ahead."""

    def __init__(self, samples: RowSamples, horizons: Sequence[int]) -> None:
        """Serve these rows; after its horizon a row stays at its last epoch."""
        self._samples = samples
        self._horizons = list(horizons)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sampler")
        self._ahead: tuple[tuple[int, ...], Future[EpochPlan]] | None = None

    def epoch(self, numbers: Sequence[int]) -> EpochPlan:
        """Return the epoch each row is at, and start drawing the one after it."""
        wanted = tuple(map(min, numbers, self._horizons))
        if self._ahead is not None and self._ahead[0] == wanted:
            plan = self._ahead[1].result()
        else:
            plan = self._samples.draw(wanted)
        following = tuple(
            min(number + 1, last) for number, last in zip(wanted, self._horizons, strict=True)
        )
        self._ahead = (following, self._pool.submit(self._samples.draw, following))
        return plan

    def close(self) -> None:
        """Stop drawing."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def draw_epoch_crops(data: TaskData, key: int, epoch: int, batch_size: int) -> Crops:
    """Draw one row's crops for an epoch, batch by batch, as a single network would draw them.

    Where the data is not varied, they are those that leave images as they are.
    """
    total = data.samples_per_step
    if data.augmentation == "none":
        middle = torch.full((total,), PADDING)
        return Crops(middle, middle, torch.zeros(total, dtype=torch.bool))
    stream = generator(key, 0, epoch, "augment")
    parts = [
        draw_crops(min(batch_size, total - start), stream) for start in range(0, total, batch_size)
    ]
    return Crops(
        torch.cat([part.top for part in parts]),
        torch.cat([part.left for part in parts]),
        torch.cat([part.is_flipped for part in parts]),
    )


def take_crops(crops: Crops, where: slice | tuple[slice, ...]) -> Crops:
    """Return some of the crops."""
    return Crops(crops.top[where], crops.left[where], crops.is_flipped[where])


class BatchBuffers:
    """Inputs x [R, B, ...] and targets y [R, B, ...] of one batch."""

    def __init__(self, compute: torch.dtype, device: torch.device) -> None:
        """Hold nothing yet; real inputs will have the precision `compute`."""
        self._compute = compute
        self._has_kernels = has_kernels(torch.zeros(0, dtype=compute, device=device))
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.x = self.y = torch.zeros(0)

    def load(self, samples: RowSamples, plan: EpochPlan, start: int, stop: int) -> None:
        """Take over some samples of an epoch; batches of one size use the same memory."""
        normalisation = samples.channel_normalisation if self._has_kernels else None
        if normalisation is not None:
            self._load_images(samples, plan, start, stop, *normalisation)
            return
        x, y = samples.gather(plan, start, stop)
        x = x.to(self._compute) if x.is_floating_point() else x
        if stop - start not in self._buffers:
            self._buffers[stop - start] = x.clone(), y.clone()
        self.x, self.y = self._buffers[stop - start]
        self.x.copy_(x)
        self.y.copy_(y)

    def _load_images(
        self,
        samples: RowSamples,
        plan: EpochPlan,
        start: int,
        stop: int,
        gain: Tensor,
        bias: Tensor,
    ) -> None:
        from esper.population.kernels.images import sample_images

        assert plan.targets is not None, "images have labels or values"
        rows, (_, channels, height, width) = len(plan.indices), samples.stored.shape
        y = plan.targets[:, start:stop]
        if stop - start not in self._buffers:
            shape = (rows, stop - start, height, width, _padded(channels))
            pixels = torch.zeros(shape, dtype=self._compute, device=samples.device)
            self._buffers[stop - start] = pixels, y.clone()
        pixels, self.y = self._buffers[stop - start]
        self.x = pixels[..., :channels].movedim(-1, 2)
        self.y.copy_(y)
        sample_images(samples.stored, plan.indices, plan.crops, gain, bias, start, pixels)


def order_images(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] in the memory order kernels want, where there are kernels."""
    if not has_kernels(x) or x.dim() != 4:
        return x
    channels = x.shape[1]
    pixels = F.pad(x.movedim(1, -1), (0, _padded(channels) - channels)).contiguous()
    return pixels[..., :channels].movedim(-1, 1)


def _padded(channels: int) -> int:
    return 1 << (channels - 1).bit_length()
