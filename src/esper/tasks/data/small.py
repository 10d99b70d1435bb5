"""CIFAR-10 at 16x16 and Fashion-MNIST at 14x14: a quarter of the pixels, a quarter of the work.

Every pixel is the mean of 2x2 pixels, a half rounded to the even neighbour. The images are read
from one small file (`cifar16.npz`, `fashion14.npz`) or, where there is none, made from the full
data set; both ways give the same bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.data import cifar, idx
from esper.tasks.data.locate import DataSet, Found, Layout
from esper.tasks.data.npz import read_npz
from esper.tasks.data.source import Array, Source

CIFAR16 = Layout("one file of CIFAR-10 at 16x16", (("cifar16.npz",),))
CIFAR16_SHAPE = (3, 16, 16)
CIFAR16_TRAIN = 30_000
"""Training images: the first of the official order."""
# Of these images, divided by 255.
CIFAR16_MEAN = (0.4916, 0.4820, 0.4461)
CIFAR16_STD = (0.2386, 0.2352, 0.2538)

FASHION14 = Layout("one file of Fashion-MNIST at 14x14", (("fashion14.npz",),))
FASHION14_SHAPE = (1, 14, 14)
# Of the 60,000 training images, divided by 255.
FASHION14_MEAN, FASHION14_STD = (0.2860,), (0.3301,)


def read_cifar16(found: Found) -> Source:
    """Return the first 30,000 training images and all test images of CIFAR-10, [N, 3, 16, 16]."""
    if found.layout is CIFAR16:
        source = _read_small(found, CIFAR16_SHAPE)
    else:
        full = cifar.read_cifar(found)
        assert full.y is not None, "CIFAR-10 has labels"
        source = _halved(
            dataclasses.replace(full, x=full.x[:CIFAR16_TRAIN], y=full.y[:CIFAR16_TRAIN])
        )
    return dataclasses.replace(
        source, name="CIFAR-10 at 16x16", scale=255.0, mean=CIFAR16_MEAN, std=CIFAR16_STD
    )


def read_fashion14(found: Found) -> Source:
    """Return all images of Fashion-MNIST, [N, 1, 14, 14]."""
    if found.layout is FASHION14:
        source = _read_small(found, FASHION14_SHAPE)
    else:
        source = _halved(idx.read_fashion(found))
    return dataclasses.replace(
        source, name="Fashion-MNIST at 14x14", scale=255.0, mean=FASHION14_MEAN, std=FASHION14_STD
    )


SMALL_CIFAR = DataSet(
    "CIFAR-10 at 16x16", (CIFAR16, *cifar.LAYOUTS), cifar.HOW_TO_GET, read_cifar16
)
SMALL_FASHION = DataSet(
    "Fashion-MNIST at 14x14", (FASHION14, idx.FASHION), idx.HOW_TO_GET, read_fashion14
)


def halve(images: Array) -> Array:
    """Return bytes [N, C, H, W] with every 2x2 pixels averaged; H and W are even."""
    count, channels, height, width = images.shape
    cells = images.reshape(count, channels, height // 2, 2, width // 2, 2)
    sums = cells.sum(axis=(3, 5), dtype=np.uint16)
    # Round halves to even, as numpy does: up by one half, less one where that hit an odd tie.
    rounded = (sums + 2) // 4
    is_odd_tie = (sums % 4 == 2) & (rounded % 2 == 1)
    averaged: Array = (rounded - is_odd_tie).astype(np.uint8)
    return averaged


def _halved(source: Source) -> Source:
    assert source.x_test is not None, "both data sets have a test split"
    return dataclasses.replace(source, x=halve(source.x), x_test=halve(source.x_test))


def _read_small(found: Found, shape: tuple[int, ...]) -> Source:
    (path,) = found.files
    source = read_npz(path)
    if source.x.dtype != np.uint8 or source.x.shape[1:] != shape or source.x_test is None:
        raise DataError(
            f"{path} should hold x_train and x_test, bytes of shape N x "
            f"{' x '.join(map(str, shape))}; got {source.x.dtype} of shape {source.x.shape}"
            f"{'' if source.x_test is not None else ' without a test part'}"
        )
    return source
