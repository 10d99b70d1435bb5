"""Fixed train, validation and test splits, the same in every run.

The validation split is carved from the training data; an official test split is kept, and where
there is none, a test split is carved too. The cut depends on the data and on `SPLIT_SEED` alone,
never on a run's seed, so that runs are compared on the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from esper.leyline.errors import DataError
from esper.leyline.randomness import generator
from esper.tasks.data.source import Array, Source

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
