"""Training samples of stacked rows: order and augmentation per row, in tensors at fixed addresses.

`RowSamples` holds the data of all rows of a stack in one tensor and draws their epochs.
`BatchBuffers` holds one batch at the address that a captured step reads. `StackedEngine` uses both;
the sequential engine draws the same samples row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.budget import Portion
from esper.lab.population.vmap_rules import has_kernels
from esper.lab.tasks.dataset import (
    PADDING,
    Crops,
    SampleOrders,
    TaskData,
    crop_flip,
    crop_seed,
    draw_crops,
)
from esper.lab.tasks.splits import Splits
from esper.lab.tasks.wrong_tokens import WrongTokens, replace_tokens
from esper.utils.process import grouped, to_device


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The next training samples of some rows; tensors [R, samples, ...] on the data's device."""

    indices: Tensor
    """int64, indices into `RowSamples.stored`."""
    targets: Tensor | None
    """Targets of each row; None for tokens, which `RowSamples.gather` finds in the samples."""
    crops: Crops | None
    rows: Tensor | None = None
    """int64 [R], indices of the rows in the stack; None for all in order."""

    def of(self, rows: Tensor) -> SamplePlan:
        """Return the plan of the rows with these indices, int64."""
        crops = None if self.crops is None else self.crops[rows]
        targets = None if self.targets is None else self.targets[rows]
        return SamplePlan(self.indices[rows], targets, crops, rows)


class RowSamples:
    """The training samples of the rows of a stack.

    Each source is in `stored` once, even if several rows use it. Targets, normalisation and
    augmentation are per row.
    """

    def __init__(self, data: Sequence[TaskData], keys: Sequence[int]) -> None:
        """Prepare the samples of rows with this data and these keys."""
        self._data, self._keys = list(data), list(keys)
        self.device = data[0].device
        # Pixels, targets and subsets that several rows share are stored once.
        self.stored, self._source_first = join_shared(
            [each.splits.samples["train"] for each in data], self.device
        )
        """Samples of all sources, one after another."""
        self._kept, self._kept_first = join_shared([each.kept for each in data], self.device)
        self._targets: tuple[Tensor, Tensor] | None = None
        given = [each.train_targets for each in data]
        if given[0] is not None:
            self._targets = join_shared([t for t in given if t is not None], self.device)
        wrong = [each.wrong_tokens for each in data]
        self._wrong_tokens = _WrongTokenRows(wrong, self.device) if any(wrong) else None
        self.gain, self.bias = stack_normalisation([each.splits for each in data])
        """Float32 [R, ...], broadcastable to samples; None if no row is normalised."""
        varied = [each.augmentation != "none" for each in data]
        self._are_varied = any(varied), all(varied)
        self._is_varied = torch.tensor(varied, device=self.device)
        alike = grouped((len(each.kept), row) for row, each in enumerate(data))
        self._orders = [
            (rows, SampleOrders([keys[row] for row in rows], size, self.device))
            for size, rows in alike.items()
        ]
        drawn = [row for rows, _ in self._orders for row in rows]
        self._place_of_row = torch.tensor(drawn, device=self.device).argsort()
        """int64 [R], index of each row after the orders of all sizes are concatenated."""

    @cached_property
    def channel_normalisation(self) -> tuple[Tensor, Tensor] | None:
        """Gain and bias [R, C] of images that are normalised per channel, else None."""
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

    def draw(self, portions: Sequence[Portion], start: int, stop: int) -> SamplePlan:
        """Draw the samples `start` to `stop` - 1 of every row's portion.

        A row with a smaller portion gets other samples as padding; it must not train on them.
        """
        firsts = [portion.first + start for portion in portions]
        positions = self._draw_positions(firsts, stop - start)
        places = self._kept[self._kept_first[:, None] + positions]
        targets = None
        if self._targets is not None:
            stored, first = self._targets
            targets = stored[first[:, None] + places]
        crops = self._draw_crops([each.epoch for each in portions], stop - start, start)
        return SamplePlan(places + self._source_first[:, None], targets, crops)

    def _draw_positions(self, firsts: Sequence[int], count: int) -> Tensor:
        """Return int64 [R, count]: positions among the samples of each row."""
        parts = [orders.draw([firsts[row] for row in rows], count) for rows, orders in self._orders]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[self._place_of_row]

    def _draw_crops(self, epochs: Sequence[int], count: int, first: int) -> Crops | None:
        some, everybody = self._are_varied
        if not some:
            return None
        seeds = [crop_seed(key, epoch) for key, epoch in zip(self._keys, epochs, strict=True)]
        drawn = draw_crops(to_device(torch.tensor(seeds), self.device), count, first)
        if everybody:
            return drawn
        # A crop from the middle does not change an image.
        varied = self._is_varied[:, None]
        return Crops(
            torch.where(varied, drawn.top, PADDING),
            torch.where(varied, drawn.left, PADDING),
            varied & drawn.is_flipped,
        )

    def gather(self, plan: SamplePlan, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return inputs [R, B, ...] and targets [R, B, ...] of some of a plan's samples."""
        indices = plan.indices[:, start:stop]
        x = self.stored[indices]
        if plan.targets is None:
            tokens = x.long()
            x, targets = tokens[..., :-1], tokens[..., 1:]
            if self._wrong_tokens is not None:
                samples = indices - _taken(self._source_first, plan.rows)[:, None]
                targets = self._wrong_tokens.replace(targets, samples, plan.rows)
            return x, targets
        if plan.crops is not None:
            part = plan.crops[:, start:stop].flatten()
            x = crop_flip(x.flatten(0, 1), part).reshape(x.shape)
        x = x.float()
        if self.gain is not None and self.bias is not None:
            gain, bias = (_taken(each, plan.rows) for each in (self.gain, self.bias))
            x = x * gain[:, None] + bias[:, None]
        return x, plan.targets[:, start:stop]


class _WrongTokenRows:
    """Replaces training targets of text; in some rows perhaps none."""

    def __init__(self, given: Sequence[WrongTokens | None], device: torch.device) -> None:
        # A row without wrong targets has the alphabet of another row and takes nothing from it.
        usual = next(each.alphabet for each in given if each is not None)
        alphabets = [usual if each is None else each.alphabet for each in given]
        self._alphabets, first = join_shared(alphabets, device)
        limits = [0 if each is None else each.limit for each in given]
        columns = first, torch.tensor([*map(len, alphabets)]), torch.tensor(limits)
        self._columns = tuple(column.to(device)[:, None, None] for column in columns)

    def replace(self, targets: Tensor, samples: Tensor, rows: Tensor | None) -> Tensor:
        """Return targets [R, B, T] of training samples [R, B] of these rows, some replaced."""
        first, size, limit = (_taken(column, rows) for column in self._columns)
        return replace_tokens(targets, samples, self._alphabets, limit, size, first)


def stack_normalisation(splits: Sequence[Splits]) -> tuple[Tensor | None, Tensor | None]:
    """Return gain and bias [R, ...] of rows; a row without normalisation gets 1 and 0."""
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


def join_shared(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Concatenate the distinct tensors; return the result and int64 [n], where each input begins.

    A tensor that occurs several times is stored once.
    """
    different = {id(tensor): tensor for tensor in tensors}
    parts = [tensor.to(device) for tensor in different.values()]
    firsts = dict(zip(different, accumulate(map(len, parts), initial=0), strict=False))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined, torch.tensor([firsts[id(tensor)] for tensor in tensors], device=device)


class BatchBuffers:
    """Inputs x [R, B, ...] and targets y [R, B, ...] of one batch."""

    def __init__(self, compute: torch.dtype, device: torch.device) -> None:
        """Start empty; real inputs will have the precision `compute`."""
        self._compute = compute
        self._has_kernels = has_kernels(torch.zeros(0, dtype=compute, device=device))
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.x = self.y = torch.zeros(0)

    def load(self, samples: RowSamples, plan: SamplePlan, start: int, stop: int) -> None:
        """Copy some samples of a plan; batches of the same size use the same memory."""
        normalisation = samples.channel_normalisation if self._has_kernels else None
        if normalisation is not None:
            gain, bias = (_taken(each, plan.rows) for each in normalisation)
            self._load_images(samples, plan, start, stop, gain, bias)
            return
        x, y = samples.gather(plan, start, stop)
        x = x.to(self._compute) if x.is_floating_point() else x
        shape = len(x), stop - start
        if shape not in self._buffers:
            self._buffers[shape] = x.clone(), y.clone()
        self.x, self.y = self._buffers[shape]
        self.x.copy_(x)
        self.y.copy_(y)

    def _load_images(
        self,
        samples: RowSamples,
        plan: SamplePlan,
        start: int,
        stop: int,
        gain: Tensor,
        bias: Tensor,
    ) -> None:
        from esper.lab.population.kernels.images import sample_images

        assert plan.targets is not None, "images have labels or values"
        rows, (_, channels, height, width) = len(plan.indices), samples.stored.shape
        y = plan.targets[:, start:stop]
        if (rows, stop - start) not in self._buffers:
            shape = (rows, stop - start, height, width, _padded(channels))
            pixels = torch.zeros(shape, dtype=self._compute, device=samples.device)
            self._buffers[rows, stop - start] = pixels, y.clone()
        pixels, self.y = self._buffers[rows, stop - start]
        self.x = pixels[..., :channels].movedim(-1, 2)
        self.y.copy_(y)
        sample_images(samples.stored, plan.indices, plan.crops, gain, bias, start, pixels)


def _taken(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the values of some rows, or of all rows."""
    return values if rows is None else values[rows]


def order_images(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] in the memory layout of the kernels, if the device has them."""
    if not has_kernels(x) or x.dim() != 4:
        return x
    channels = x.shape[1]
    pixels = F.pad(x.movedim(1, -1), (0, _padded(channels) - channels)).contiguous()
    return pixels[..., :channels].movedim(-1, 1)


def _padded(channels: int) -> int:
    return 1 << (channels - 1).bit_length()
