"""`Splits`: the fixed training, validation and test split of a source, on one device.

All tasks on one source share its splits, whichever training samples each uses (`tasks.dataset`), so
the samples are in memory once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.training import ObjectiveName
from esper.lab.tasks.data.source import Array, Kind, Source, Target
from esper.leyline.errors import ConfigError, DataError
from esper.utils.randomness import generator

SPLIT_SEED = 20_260_101
TOKEN_BLOCK = 32
"""Sequences of text that stay together in a split."""

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

    Labelled samples are split class by class, text in blocks of neighbouring sequences, and real
    targets at random. The order of the samples is kept.
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
        # A class of one sample stays in the rest; larger classes give at least one sample.
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
        if source.x_val is None:
            train, val = carve(train, val_fraction, "val")
        else:
            val = Part(source.x_val, source.y_val)
    except DataError as error:
        raise DataError(f"{source.origin}: {error}") from None
    return {"train": train, "val": val, "test": test}


def select_classes(source: Source, classes: Sequence[int]) -> Source:
    """Return the samples of some classes, renumbered in this order."""
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
    others: dict[str, Any] = {}
    for split in ("val", "test"):
        own = getattr(source, f"x_{split}"), getattr(source, f"y_{split}")
        if own[0] is not None:
            others[f"x_{split}"], others[f"y_{split}"] = chosen(*own)
    return dataclasses.replace(source, x=x, y=y, num_classes=len(classes), **others)


def subsample(part: Part, size: int, *keys: int | str) -> Array:
    """Return the sorted indices of `size` samples, keeping class shares as far as possible."""
    count = len(part.x)
    if size > count:
        raise DataError(f"train_size is {size}, but the training split has only {count} samples")
    order = permutation(count, *keys)
    if part.y is not None and part.y.dtype.kind != "f":
        # Rank each sample within its class, as a share of the class. The smallest ranks of all
        # classes together have every class in proportion.
        shares = np.empty(count)
        for label in np.unique(part.y):
            members = order[part.y[order] == label]
            shares[members] = (np.arange(len(members)) + 0.5) / len(members)
        order = order[np.argsort(shares[order], kind="stable")]
    return np.sort(order[:size])


def corrupt_labels(labels: Array, rate: float, num_classes: int, *keys: int | str) -> Array:
    """Return labels with a share of them replaced; a higher rate replaces more of the same."""
    count = round(rate * len(labels))
    chosen = permutation(len(labels), *keys, "which")[:count]
    shift = torch.randint(
        1, num_classes, (len(labels),), generator=generator(SPLIT_SEED, *keys, "shift")
    ).numpy()
    corrupted = labels.copy()
    corrupted[chosen] = (labels[chosen] + shift[chosen]) % num_classes
    return corrupted


OBJECTIVE_FOR: dict[Target, ObjectiveName] = {
    "class": "classification",
    "real": "regression",
    "next_token": "language",
}


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """A source in three parts, with the normalisation of its whole training split.

    Attributes:
        name: What the data is, for people.
        kind: Whether samples are images, features or tokens.
        objective: Name of the objective that fits the targets.
        num_classes: Number of classes or distinct tokens; None for real targets.
        samples: Samples of each split, as stored.
        targets: Labels or values of each split; empty for tokens.
        gain: Factor that normalises stored values; None if they are used as they are.
        bias: Offset after the factor.
    """

    name: str
    kind: Kind
    objective: ObjectiveName
    num_classes: int | None
    samples: dict[Split, Tensor]
    targets: dict[Split, Tensor]
    gain: Tensor | None
    bias: Tensor | None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.samples["train"].device

    def fingerprint(self) -> str:
        """Return a checksum of all samples and targets, wherever they were read from."""
        digest = hashlib.blake2b(digest_size=16)
        for tensors in (self.samples, self.targets):
            for split in sorted(tensors):
                values = np.ascontiguousarray(tensors[split].cpu().numpy())
                digest.update(f"{split} {values.dtype} {values.shape}".encode())
                digest.update(values.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Splits:
        """Return the same on another device; itself if it is there already."""
        if self.device == torch.empty(0, device=device).device:
            return self
        return dataclasses.replace(
            self,
            samples={split: tensor.to(device) for split, tensor in self.samples.items()},
            targets={split: tensor.to(device) for split, tensor in self.targets.items()},
            gain=None if self.gain is None else self.gain.to(device),
            bias=None if self.bias is None else self.bias.to(device),
        )


def make_splits(
    source: Source,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    device: torch.device | str = "cpu",
) -> Splits:
    """Split a source and put it on a device.

    Args:
        source: The data, as read.
        val_fraction: Share of the training data set aside for validation.
        test_fraction: Share set aside for testing where there is no official test split.
        device: Where the tensors go.
    """
    parts = split_source(source, val_fraction, test_fraction)
    gain, bias = _normalisation(source, parts["train"])
    made = Splits(
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
    )
    return made.to(device)


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
