"""`TaskData`: what one task trains on and is judged by, served by index.

Tasks on one source share its `Splits`. A task has its own choice of training samples and its own
targets for them, so that a smaller or a noisier variant costs indices and labels, not pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.training import ObjectiveName
from esper.lab.tasks.data.source import Kind, Source
from esper.lab.tasks.splits import (
    Part,
    Split,
    Splits,
    corrupt_labels,
    make_splits,
    permutation,
    subsample,
)
from esper.leyline.errors import ConfigError, DataError
from esper.utils.process import to_device
from esper.utils.randomness import derive_seed, random_orders, random_words

# ---- How training images are varied: crops out of a border of zeros, and mirrors


Augmentation = Literal["none", "crop_flip"]

PADDING = 4


@dataclass(frozen=True, slots=True)
class Crops:
    """Where each image is cut from its padded self, and whether it is mirrored; of one shape."""

    top: Tensor
    left: Tensor
    is_flipped: Tensor

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Crops:
        return Crops(self.top[where], self.left[where], self.is_flipped[where])

    def flatten(self) -> Crops:
        """Return the same crops in one dimension."""
        return Crops(self.top.flatten(), self.left.flatten(), self.is_flipped.flatten())


def draw_crops(seeds: Tensor, count: int) -> Crops:
    """Draw [R, count] crops on the device of the seeds, int64 [R]."""
    words, places = random_words(seeds, count), 2 * PADDING + 1
    # Every crop is made of the bits of one word: 16 for the row, 15 for the column, one to mirror.
    return Crops(
        ((words & 0xFFFF) * places) >> 16,
        (((words >> 16) & 0x7FFF) * places) >> 15,
        (words >> 31).bool(),
    )


def crop_flip(images: Tensor, crops: Crops) -> Tensor:
    """Return images [B, C, H, W] of any type, shifted within a border of zeros and mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    rows = crops.top.to(device)[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(crops.is_flipped.to(device)[:, None], columns.flip(1), columns)
    columns = crops.left.to(device)[:, None] + columns
    padded = F.pad(images, (PADDING, PADDING, PADDING, PADDING))
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


# ---- Which samples an epoch has: a function of a row's key and of the epoch's number alone


class EpochOrders:
    """The orders of rows that have equally many samples.

    Args:
        keys: names of the rows' random streams.
        size: training samples of a row.
        samples: samples of an epoch.
        device: where orders are drawn.
    """

    def __init__(
        self, keys: Sequence[int], size: int, samples: int, device: torch.device | str = "cpu"
    ) -> None:
        """Draw nothing yet."""
        self._keys, self._size, self._samples = list(keys), size, samples
        self._device = torch.device(device)
        self._passes: dict[tuple[int, ...], Tensor] = {}
        """The passes that the last epoch touched, by their number in every row."""

    def draw(self, epochs: Sequence[int]) -> Tensor:
        """Return int64 [R, samples]: positions in 0, ..., size - 1 of the epoch each row is at."""
        starts = [divmod((epoch - 1) * self._samples, self._size) for epoch in epochs]
        most = max(offset + self._samples for _, offset in starts)
        numbers = [
            tuple(number + later for number, _ in starts) for later in range(-(-most // self._size))
        ]
        # The next epoch mostly goes on in the same pass.
        self._passes = {
            which: self._passes[which] if which in self._passes else self._draw_pass(which)
            for which in numbers
        }
        orders = torch.cat([self._passes[which] for which in numbers], 1)
        offsets = to_device(torch.tensor([offset for _, offset in starts]), self._device)
        places = offsets[:, None] + torch.arange(self._samples, device=self._device)
        return orders.gather(1, places).long()

    def _draw_pass(self, numbers: Sequence[int]) -> Tensor:
        """Return int32 [R, size]: everything once, in the order of a row's pass of this number."""
        seeds = [
            derive_seed(key, "pass", number)
            for key, number in zip(self._keys, numbers, strict=True)
        ]
        return random_orders(to_device(torch.tensor(seeds), self._device), self._size).int()


VALIDATION_SAMPLES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class TaskData:
    """A data set ready for training.

    Attributes:
        splits: The source, shared with other tasks on it.
        kept: int64 on the CPU, in order: the training samples that are used.
        train_targets: Targets of all training samples of the splits; None for tokens.
        subset: Indices of the fixed validation samples used inside an episode.
        samples_per_step: Samples in one epoch of training.
        augmentation: How training images are varied.
    """

    splits: Splits
    kept: Tensor
    train_targets: Tensor | None
    subset: Tensor
    samples_per_step: int
    augmentation: Augmentation = "none"

    @property
    def name(self) -> str:
        """What the data is, for people."""
        return self.splits.name

    @property
    def kind(self) -> Kind:
        """Whether samples are images, features or tokens."""
        return self.splits.kind

    @property
    def objective(self) -> ObjectiveName:
        """Name of the objective that fits the targets."""
        return self.splits.objective

    @property
    def num_classes(self) -> int | None:
        """Number of classes or distinct tokens; None for real targets."""
        return self.splits.num_classes

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.subset.device

    def size(self, split: Split) -> int:
        """Return the number of samples of a split that are used."""
        return len(self.kept) if split == "train" else len(self.splits.samples[split])

    def indices(self, split: Split) -> Tensor:
        """Return all samples of a split that are used, as `batch` takes them."""
        if split == "train":
            return self.kept.to(self.device)
        return torch.arange(self.size(split), device=self.device)

    def targets(self, split: Split) -> Tensor | None:
        """Return the targets of all samples of a split; None for tokens."""
        return self.train_targets if split == "train" else self.splits.targets.get(split)

    def on(self, splits: Splits) -> TaskData:
        """Return the same data with its source in another place."""
        given = self.train_targets
        if given is not None:
            is_shared = given is self.splits.targets["train"]
            given = splits.targets["train"] if is_shared else given.to(splits.device)
        return dataclasses.replace(
            self, splits=splits, train_targets=given, subset=self.subset.to(splits.device)
        )

    def batch(
        self, split: Split, indices: Tensor, crops: Crops | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some samples.

        Args:
            split: Which split the indices are of.
            indices: Samples of the split, used or not, in any shape; it becomes the leading shape
                of the batch.
            crops: If given, how images are cut and mirrored, in the same shape.

        Returns:
            Normalised float32 inputs, or int64 tokens; and labels, values or next tokens.
        """
        indices = indices.to(self.device)
        x = self.splits.samples[split][indices]
        if self.kind == "tokens":
            tokens = x.long()
            return tokens[..., :-1], tokens[..., 1:]
        if crops is not None:
            flat = x.reshape(-1, *x.shape[-3:])
            x = crop_flip(flat, crops.flatten()).reshape(x.shape)
        x = x.float()
        if self.splits.gain is not None and self.splits.bias is not None:
            x = x * self.splits.gain + self.splits.bias
        targets = self.targets(split)
        assert targets is not None, "what is no text has targets"
        return x, targets[indices]

    def order(self, key: int, epoch: int) -> Tensor:
        """Return the training samples of an epoch, int64 [samples_per_step] on the CPU.

        It depends on the key and the number of the epoch, from 1, alone. No sample comes twice
        before all have come once, from the first epoch on.
        """
        orders = EpochOrders([key], len(self.kept), self.samples_per_step)
        return self.kept[orders.draw([epoch])[0]]

    def crops(self, key: int, epoch: int) -> Crops | None:
        """Return how the images of an epoch are varied, [samples_per_step]; None for not at all."""
        if self.augmentation == "none":
            return None
        crops = draw_crops(torch.tensor([crop_seed(key, epoch)]), self.samples_per_step)
        return crops.flatten()


def crop_seed(key: int, epoch: int) -> int:
    """Return the seed of the crops of a row's epoch."""
    return derive_seed(key, "crops", epoch)


def make_data(
    source: Source,
    *,
    samples_per_step: int | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    train_size: int | None = None,
    label_noise: float = 0.0,
    augmentation: Augmentation = "none",
    validation_samples: int = VALIDATION_SAMPLES,
    device: torch.device | str = "cpu",
) -> TaskData:
    """Split a source, choose from it and put it on a device; see `make_splits`, `choose_data`."""
    splits = make_splits(
        source, val_fraction=val_fraction, test_fraction=test_fraction, device=device
    )
    return choose_data(
        splits,
        samples_per_step=samples_per_step,
        train_size=train_size,
        label_noise=label_noise,
        augmentation=augmentation,
        validation_samples=validation_samples,
    )


def choose_data(
    splits: Splits,
    *,
    samples_per_step: int | None = None,
    train_size: int | None = None,
    label_noise: float = 0.0,
    augmentation: Augmentation = "none",
    validation_samples: int = VALIDATION_SAMPLES,
) -> TaskData:
    """Return what a task uses of a source; the splits themselves are shared, not copied.

    Args:
        splits: The source.
        samples_per_step: Samples in one epoch; the training samples in use if None.
        train_size: Keep only this many training samples.
        label_noise: Share of the training labels that are replaced by another class.
        augmentation: How training images are varied.
        validation_samples: Size of the fixed validation subset; all, where there are fewer.
    """
    if augmentation != "none" and splits.kind != "image":
        raise ConfigError(f"augment {augmentation!r} is for images, but {splits.name} has none")
    stored, targets = len(splits.samples["train"]), splits.targets.get("train")
    kept = np.arange(stored)
    if train_size is not None:
        labels = None if targets is None else targets.cpu().numpy()
        try:
            kept = subsample(Part(kept, labels), train_size, "train_size")
        except DataError as error:
            raise ConfigError(str(error)) from None
    if label_noise > 0.0:
        if splits.objective != "classification" or (splits.num_classes or 0) < 2:
            raise ConfigError(f"label_noise needs two or more classes, but {splits.name} has none")
        assert targets is not None
        assert splits.num_classes is not None
        labels = targets.cpu().numpy().copy()
        labels[kept] = corrupt_labels(labels[kept], label_noise, splits.num_classes, "label_noise")
        targets = torch.from_numpy(labels).to(splits.device)
    chosen = np.sort(permutation(len(splits.samples["val"]), "subset")[:validation_samples])
    return TaskData(
        splits=splits,
        kept=torch.from_numpy(kept),
        train_targets=targets,
        subset=torch.from_numpy(chosen).to(splits.device),
        samples_per_step=samples_per_step or len(kept),
        augmentation=augmentation,
    )
