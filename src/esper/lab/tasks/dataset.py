"""`TaskData`: the training, validation and test samples of one task, by index.

Tasks on one source share its `Splits`. Each has its own choice of training samples and its own
targets, so that a smaller or noisier variant only stores indices and labels.
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
from esper.lab.tasks.wrong_tokens import WrongTokens, choose_wrong_tokens
from esper.leyline.errors import ConfigError, DataError
from esper.utils.process import to_device
from esper.utils.randomness import derive_seed, random_orders, random_words

# ---- Augmentation: random crops out of a border of zeros, and flips


Augmentation = Literal["none", "crop_flip"]

PADDING = 4


@dataclass(frozen=True, slots=True)
class Crops:
    """Position of each crop in the padded image, and whether it is flipped; all of one shape."""

    top: Tensor
    left: Tensor
    is_flipped: Tensor

    def __getitem__(self, where: slice | tuple[slice, ...] | Tensor) -> Crops:
        return Crops(self.top[where], self.left[where], self.is_flipped[where])

    def flatten(self) -> Crops:
        """Return the same crops in one dimension."""
        return Crops(self.top.flatten(), self.left.flatten(), self.is_flipped.flatten())


def draw_crops(seeds: Tensor, count: int, first: int = 0) -> Crops:
    """Draw [R, count] crops on the device of the seeds, int64 [R]; `first` is their first index."""
    words, places = random_words(seeds, count, first), 2 * PADDING + 1
    # A crop takes the bits of one word: 16 for the row, 15 for the column, one to flip.
    return Crops(
        ((words & 0xFFFF) * places) >> 16,
        (((words >> 16) & 0x7FFF) * places) >> 15,
        (words >> 31).bool(),
    )


def crop_flip(images: Tensor, crops: Crops) -> Tensor:
    """Return images [B, C, H, W] of any type, cropped from a border of zeros and flipped."""
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


# ---- Which samples come next depends on a row's key and on how many came before


class SampleOrders:
    """Draws the sample orders of rows with equally many samples.

    Args:
        keys: seeds of the rows' random streams.
        size: number of training samples of a row.
        device: device of the orders.
    """

    def __init__(self, keys: Sequence[int], size: int, device: torch.device | str = "cpu") -> None:
        """Prepare; `draw` returns an order."""
        self._keys, self._size = list(keys), size
        self._device = torch.device(device)
        self._passes: dict[tuple[int, ...], Tensor] = {}
        """The passes that were touched last, by their number in every row."""

    def draw(self, firsts: Sequence[int], samples: int) -> Tensor:
        """Return int64 [R, samples]: positions in 0, ..., size - 1.

        Args:
            firsts: samples that each row has seen before.
            samples: how many come next.
        """
        starts = [divmod(first, self._size) for first in firsts]
        most = max(offset + samples for _, offset in starts)
        numbers = [
            tuple(number + later for number, _ in starts) for later in range(-(-most // self._size))
        ]
        # Cached: what comes next usually continues the same pass.
        self._passes = {
            which: self._passes[which] if which in self._passes else self._draw_pass(which)
            for which in numbers
        }
        orders = torch.cat([self._passes[which] for which in numbers], 1)
        offsets = to_device(torch.tensor([offset for _, offset in starts]), self._device)
        places = offsets[:, None] + torch.arange(samples, device=self._device)
        return orders.gather(1, places).long()

    def _draw_pass(self, numbers: Sequence[int]) -> Tensor:
        """Return int32 [R, size]: a permutation for every row's pass of this number."""
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
        kept: int64 on the CPU, sorted: the training samples in use.
        train_targets: Targets of all training samples of the splits; None for tokens.
        subset: Indices of the fixed validation samples that are scored after every epoch.
        samples_per_step: Samples in one epoch of training.
        augmentation: Augmentation of training images.
        wrong_tokens: Training targets of text that are replaced; None where all are right.
    """

    splits: Splits
    kept: Tensor
    train_targets: Tensor | None
    subset: Tensor
    samples_per_step: int
    augmentation: Augmentation = "none"
    wrong_tokens: WrongTokens | None = None

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
        """Return the same data on other splits, such as those on another device."""
        given = self.train_targets
        if given is not None:
            is_shared = given is self.splits.targets["train"]
            given = splits.targets["train"] if is_shared else given.to(splits.device)
        wrong = self.wrong_tokens
        return dataclasses.replace(
            self,
            splits=splits,
            train_targets=given,
            subset=self.subset.to(splits.device),
            wrong_tokens=None if wrong is None else wrong.to(splits.device),
        )

    def batch(
        self, split: Split, indices: Tensor, crops: Crops | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some samples.

        Args:
            split: Which split the indices are of.
            indices: Samples of the split, used or not, in any shape; it becomes the leading shape
                of the batch.
            crops: Crops of the images, in the same shape; None for whole images.

        Returns:
            Normalised float32 inputs, or int64 tokens; and labels, values or next tokens.
        """
        indices = indices.to(self.device)
        x = self.splits.samples[split][indices]
        if self.kind == "tokens":
            tokens = x.long()
            x, targets = tokens[..., :-1], tokens[..., 1:]
            if split == "train" and self.wrong_tokens is not None:
                targets = self.wrong_tokens.replace(targets, indices)
            return x, targets
        if crops is not None:
            flat = x.reshape(-1, *x.shape[-3:])
            x = crop_flip(flat, crops.flatten()).reshape(x.shape)
        x = x.float()
        if self.splits.gain is not None and self.splits.bias is not None:
            x = x * self.splits.gain + self.splits.bias
        given = self.targets(split)
        assert given is not None, "what is no text has targets"
        return x, given[indices]

    def order(self, key: int, epoch: int) -> Tensor:
        """Return the training samples of an epoch, int64 [samples_per_step] on the CPU.

        It depends on the key and the number of the epoch, from 1, alone. Every sample is used once
        before any is used again.
        """
        samples = self.samples_per_step
        return self.order_from(key, (epoch - 1) * samples, samples)

    def order_from(self, key: int, first: int, samples: int) -> Tensor:
        """Return the training samples after the `first` ones, int64 [samples] on the CPU."""
        return self.kept[SampleOrders([key], len(self.kept)).draw([first], samples)[0]]

    def crops(self, key: int, epoch: int, samples: int | None = None) -> Crops | None:
        """Return the crops of an epoch; None without augmentation.

        There are [samples], by default as many as an epoch has.
        """
        if self.augmentation == "none":
            return None
        count = self.samples_per_step if samples is None else samples
        return draw_crops(torch.tensor([crop_seed(key, epoch)]), count).flatten()


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
    """Return the data of a task; the splits are shared, not copied.

    Args:
        splits: The splits of the source.
        samples_per_step: Samples in one epoch; by default the number of training samples in use.
        train_size: Use only this many training samples.
        label_noise: Share of the training labels that are replaced by another class, or of the
            next tokens of a text by another of its tokens.
        augmentation: Augmentation of training images.
        validation_samples: Size of the fixed validation subset; all samples if there are fewer.
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
    wrong_tokens = None
    if label_noise > 0.0 and splits.kind == "tokens":
        wrong_tokens = choose_wrong_tokens(splits, label_noise)
    elif label_noise > 0.0:
        if splits.objective != "classification" or (splits.num_classes or 0) < 2:
            raise ConfigError(
                f"label_noise needs two or more classes, or text, but {splits.name} has neither"
            )
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
        wrong_tokens=wrong_tokens,
    )
