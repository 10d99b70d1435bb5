"""`TaskData`: fixed splits as tensors on one device, served by index, with augmentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.errors import ConfigError, DataError
from esper.leyline.randomness import generator
from esper.leyline.randomness import generator as stream
from esper.tasks.data.source import Array, Kind, Source, Target
from esper.tasks.objective import ObjectiveName

SPLIT_SEED = 20_260_101
TOKEN_BLOCK = 32
"""Sequences of text that stay together, so that few neighbours are torn apart by a split."""

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one split, and their labels unless they are tokens."""

    x: Array
    y: Array | None

    def take(self, indices: Array) -> Part:
        """Return the part that these indices name."""
        return Part(self.x[indices], None if self.y is None else self.y[indices])


def permutation(count: int, *keys: int | str) -> Array:
    """Return a fixed permutation for the purpose that the keys name."""
    return torch.randperm(count, generator=generator(SPLIT_SEED, *keys)).numpy()


def carve(part: Part, fraction: float, *keys: int | str) -> tuple[Part, Part]:
    """Divide a part into (rest, carved), with about `fraction` of the samples carved.

    Labelled samples are carved class by class, text in blocks of neighbouring sequences, and
    everything else at random. The order of the samples is kept.
    """
    count = len(part.x)
    if part.y is None:
        blocks = -(-count // TOKEN_BLOCK)
        wanted = max(1, round(blocks * fraction))
        chosen = np.isin(np.arange(count) // TOKEN_BLOCK, permutation(blocks, *keys)[:wanted])
    else:
        chosen = np.zeros(count, dtype=bool)
        chosen[_stratified(part.y, fraction, *keys)] = True
    rest, carved = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    if not len(rest) or not len(carved):
        raise DataError(
            f"{count} samples are too few to set {fraction:.0%} of them aside; give more data"
        )
    return part.take(rest), part.take(carved)


def _stratified(y: Array, fraction: float, *keys: int | str) -> Array:
    """Return indices with about the same share of every class; real targets are one class."""
    groups = [np.arange(len(y))]
    if y.dtype.kind != "f":
        groups = [np.flatnonzero(y == label) for label in np.unique(y)]
    chosen = []
    for number, group in enumerate(groups):
        # A class of one stays whole on the training side; two or more give at least one away.
        wanted = min(max(1, round(len(group) * fraction)), len(group) - 1)
        chosen.append(group[permutation(len(group), *keys, number)[:wanted]])
    return np.concatenate(chosen)


def split_source(source: Source, val_fraction: float, test_fraction: float) -> dict[Split, Part]:
    """Return the three splits of a source."""
    train = Part(source.x, source.y)
    try:
        if source.x_test is None:
            train, test = carve(train, test_fraction, "test")
        else:
            test = Part(source.x_test, source.y_test)
        train, val = carve(train, val_fraction, "val")
    except DataError as error:
        raise DataError(f"{source.origin}: {error}") from None
    return {"train": train, "val": val, "test": test}


def select_classes(source: Source, classes: Sequence[int]) -> Source:
    """Return the samples of some classes, which are numbered anew in this order."""
    if source.y is None or source.target != "class":
        raise ConfigError(f"classes can be chosen of labelled data alone; {source.name} has none")
    if max(classes) >= (source.num_classes or 0):
        raise ConfigError(
            f"classes has {max(classes)}, but {source.name} has only 0 to "
            f"{(source.num_classes or 0) - 1}"
        )
    number = np.full(source.num_classes or 0, -1, dtype=np.int64)
    number[list(classes)] = np.arange(len(classes))

    def chosen(x: Array, y: Array) -> tuple[Array, Array]:
        kept = number[y] >= 0
        return x[kept], number[y[kept]]

    x, y = chosen(source.x, source.y)
    x_test, y_test = source.x_test, source.y_test
    if x_test is not None and y_test is not None:
        x_test, y_test = chosen(x_test, y_test)
    return dataclasses.replace(
        source, x=x, y=y, x_test=x_test, y_test=y_test, num_classes=len(classes)
    )


def subsample(part: Part, size: int, *keys: int | str) -> Part:
    """Return `size` samples, class shares kept as far as whole samples allow; order is kept."""
    count = len(part.x)
    if size > count:
        raise DataError(f"train_size is {size}, but the training split has only {count} samples")
    order = permutation(count, *keys)
    if part.y is not None and part.y.dtype.kind != "f":
        # Rank each sample inside its class, as a share of the class: the smallest ranks of all
        # classes together hold every class in proportion.
        shares = np.empty(count)
        for label in np.unique(part.y):
            members = order[part.y[order] == label]
            shares[members] = (np.arange(len(members)) + 0.5) / len(members)
        order = order[np.argsort(shares[order], kind="stable")]
    return part.take(np.sort(order[:size]))


def corrupt_labels(part: Part, rate: float, num_classes: int, *keys: int | str) -> Part:
    """Replace the labels of a share of the samples by another class; a higher rate adds to it."""
    assert part.y is not None, "only labelled data can have label noise"
    count = round(rate * len(part.y))
    chosen = permutation(len(part.y), *keys, "which")[:count]
    shift = torch.randint(
        1, num_classes, (len(part.y),), generator=generator(SPLIT_SEED, *keys, "shift")
    ).numpy()
    y = part.y.copy()
    y[chosen] = (y[chosen] + shift[chosen]) % num_classes
    return Part(part.x, y)


Augmentation = Literal["none", "crop_flip"]

PADDING = 4


@dataclass(frozen=True, slots=True)
class Crops:
    """Where each image is cut from its padded self, and whether it is mirrored; all [B]."""

    top: Tensor
    left: Tensor
    is_flipped: Tensor


def draw_crops(count: int, generator: torch.Generator, padding: int = PADDING) -> Crops:
    """Draw crops for `count` images on the generator's own device."""
    offsets = torch.randint(
        0, 2 * padding + 1, (2, count), generator=generator, device=generator.device
    )
    flips = torch.randint(0, 2, (count,), generator=generator, device=generator.device)
    return Crops(offsets[0], offsets[1], flips.bool())


def crop_flip(images: Tensor, crops: Crops, padding: int = PADDING) -> Tensor:
    """Return images [B, C, H, W] of any type, shifted within a border of zeros and mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    rows = crops.top.to(device)[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(crops.is_flipped.to(device)[:, None], columns.flip(1), columns)
    columns = crops.left.to(device)[:, None] + columns
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


VALIDATION_SAMPLES = 1024

OBJECTIVE_FOR: dict[Target, ObjectiveName] = {
    "class": "classification",
    "real": "regression",
    "next_token": "language",
}


@dataclass(frozen=True, slots=True)
class TaskData:
    """A data set ready for training.

    Attributes:
        name: What the data is, for people.
        kind: Whether samples are images, features or tokens.
        objective: Name of the objective that fits the targets.
        num_classes: Number of classes or distinct tokens; None for real targets.
        samples: Samples of each split, as stored.
        targets: Labels or values of each split; empty for tokens.
        gain: Factor that normalises stored values; None where they are used as they are.
        bias: Offset after the factor.
        subset: Indices of the fixed validation samples used inside an episode.
        samples_per_step: Samples in one epoch of training.
        augmentation: How training images are varied.
    """

    name: str
    kind: Kind
    objective: ObjectiveName
    num_classes: int | None
    samples: dict[Split, Tensor]
    targets: dict[Split, Tensor]
    gain: Tensor | None
    bias: Tensor | None
    subset: Tensor
    samples_per_step: int
    augmentation: Augmentation = "none"

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.subset.device

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.samples[split])

    def to(self, device: torch.device | str) -> TaskData:
        """Return the same data on another device."""
        return dataclasses.replace(
            self,
            samples={split: tensor.to(device) for split, tensor in self.samples.items()},
            targets={split: tensor.to(device) for split, tensor in self.targets.items()},
            gain=None if self.gain is None else self.gain.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            subset=self.subset.to(device),
        )

    def batch(
        self, split: Split, indices: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some samples.

        Args:
            split: Which split the indices are of.
            indices: Sample indices of any shape, which becomes the leading shape of the batch.
            generator: If given, images are augmented with draws from it.

        Returns:
            Normalised float32 inputs, or int64 tokens; and labels, values or next tokens.
        """
        indices = indices.to(self.device)
        x = self.samples[split][indices]
        if self.kind == "tokens":
            tokens = x.long()
            return tokens[..., :-1], tokens[..., 1:]
        if generator is not None:
            x = self.augment(x, generator)
        x = x.float()
        if self.gain is not None and self.bias is not None:
            x = x * self.gain + self.bias
        return x, self.targets[split][indices]

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images [..., C, H, W] varied as the task asks, or as they are."""
        if self.augmentation == "none":
            return images
        flat = images.reshape(-1, *images.shape[-3:])
        return crop_flip(flat, draw_crops(len(flat), generator)).reshape(images.shape)

    def order(self, *keys: int | str) -> Tensor:
        """Return the training indices of one epoch, [samples_per_step], on the data's device.

        The order depends on the keys alone. No sample comes twice before all have come once; an
        epoch longer than the data goes on with a fresh permutation.
        """
        size = self.size("train")
        passes = -(-self.samples_per_step // size)
        drawn = [
            torch.randperm(size, generator=stream(*keys, "order", number))
            for number in range(passes)
        ]
        return torch.cat(drawn)[: self.samples_per_step].to(self.device)


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
    """Split a source and put it on a device.

    Args:
        source: The data as it was read.
        samples_per_step: Samples in one epoch; the whole training split if None.
        val_fraction: Share of the training data set aside for validation.
        test_fraction: Share set aside for testing where there is no official test split.
        train_size: Keep only this many training samples.
        label_noise: Share of the training labels that are replaced by another class.
        augmentation: How training images are varied.
        validation_samples: Size of the fixed validation subset; all, where there are fewer.
        device: Where the tensors go.
    """
    if augmentation != "none" and source.kind != "image":
        raise ConfigError(f"augment {augmentation!r} is for images, but {source.name} has none")
    parts = split_source(source, val_fraction, test_fraction)
    try:
        if train_size is not None:
            parts["train"] = subsample(parts["train"], train_size, "train_size")
    except DataError as error:
        raise ConfigError(str(error)) from None
    if label_noise > 0.0:
        if source.target != "class" or source.num_classes is None or source.num_classes < 2:
            raise ConfigError(f"label_noise needs two or more classes, but {source.name} has none")
        parts["train"] = corrupt_labels(
            parts["train"], label_noise, source.num_classes, "label_noise"
        )
    gain, bias = _normalisation(source, parts["train"])
    chosen = np.sort(permutation(len(parts["val"].x), "subset")[:validation_samples])
    data = TaskData(
        name=source.name,
        kind=source.kind,
        objective=OBJECTIVE_FOR[source.target],
        num_classes=source.num_classes,
        samples={split: torch.from_numpy(part.x) for split, part in parts.items()},
        targets={
            split: torch.from_numpy(part.y) for split, part in parts.items() if part.y is not None
        },
        gain=gain,
        bias=bias,
        subset=torch.from_numpy(chosen),
        samples_per_step=samples_per_step or len(parts["train"].x),
        augmentation=augmentation,
    )
    return data.to(device)


def _normalisation(source: Source, train: Part) -> tuple[Tensor | None, Tensor | None]:
    """Return (gain, bias), broadcastable to a batch: stored * gain + bias is normalised."""
    if source.kind == "tokens":
        return None, None
    if source.mean is not None and source.std is not None:
        mean, std = np.array(source.mean), np.array(source.std)
    elif train.x.dtype == np.uint8:
        channels = train.x.swapaxes(0, 1) if source.kind == "image" else train.x[None]
        mean, std = _byte_statistics(channels, source.scale)
    else:
        return None, None
    gain = torch.from_numpy(1.0 / (source.scale * std)).float()
    bias = torch.from_numpy(-mean / std).float()
    if source.kind == "image":
        gain, bias = gain[:, None, None], bias[:, None, None]
    return gain, bias


def _byte_statistics(channels: Array, scale: float) -> tuple[Array, Array]:
    """Return mean and deviation of each channel of bytes, from counts rather than float copies."""
    levels = np.arange(256) / scale
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels])
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ levels
    variance = (shares * (levels - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.sqrt(np.where(variance > 0, variance, 1.0))
