"""The idx format of MNIST and Fashion-MNIST, plain or gzipped.

Header: two zero bytes, a byte for the element type (8 is unsigned byte), a byte for the number of
dimensions, then each dimension as a big-endian 32-bit number; the elements follow.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.data.locate import DataSet, Found, Layout, data_file
from esper.tasks.data.source import Array, Source

UNSIGNED_BYTE = 8
_MOST_EXPANSION = 1100
"""How much more a gzipped file can hold than it takes; the format's own limit is 1032."""
# Of the 60,000 training images of Fashion-MNIST, divided by 255.
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
HOW_TO_GET = (
    "get the four idx gz files from https://github.com/zalandoresearch/fashion-mnist "
    "(folder data/fashion) and put them into a folder fashion-mnist"
)


def _names(stem: str, dimensions: int) -> tuple[str, ...]:
    """Return the spellings one idx file has in the wild, the official one first."""
    plain = (f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte")
    return (f"{plain[0]}.gz", plain[0], plain[1], f"{plain[1]}.gz")


FILES = (
    _names("train-images", 3),
    _names("train-labels", 1),
    _names("t10k-images", 3),
    _names("t10k-labels", 1),
)
# MNIST has the very same file names, so only a folder's name or the user can tell them apart.
FASHION = Layout(
    "Fashion-MNIST idx files",
    FILES,
    ("fashion-mnist", "fashion_mnist", "fashion", "FashionMNIST/raw"),
    is_telling=False,
)
ANY = Layout("idx files", FILES, (*FASHION.folders, "mnist", "MNIST/raw"))


def read_fashion(found: Found) -> Source:
    """Return Fashion-MNIST with its fixed normalisation."""
    return read_idx(found, name="Fashion-MNIST", mean=(FASHION_MEAN,), std=(FASHION_STD,))


FASHION_MNIST = DataSet("Fashion-MNIST", (FASHION,), HOW_TO_GET, read_fashion)


def read_idx(
    found: Found,
    name: str = "idx files",
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Source:
    """Return four idx files as images [N, 1, H, W] with labels and their official test split."""
    images, labels, test_images, test_labels = found.files
    y = read_array(labels, dimensions=1).astype(np.int64)
    return Source(
        name=name,
        origin=str(found.folder),
        x=read_array(images, dimensions=3)[:, None],
        y=y,
        x_test=read_array(test_images, dimensions=3)[:, None],
        y_test=read_array(test_labels, dimensions=1).astype(np.int64),
        num_classes=int(y.max()) + 1,
        scale=255.0,
        mean=mean,
        std=std,
    )


def read_array(path: Path, dimensions: int) -> Array:
    """Return one idx file of unsigned bytes with the given number of dimensions."""
    with data_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            if not is_gzipped:
                return _read_stream(path, file, dimensions, size)
            with gzip.GzipFile(fileobj=file) as stream:
                most = _MOST_EXPANSION * size
                return _read_stream(path, cast(BinaryIO, stream), dimensions, most)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path} is cut off or damaged ({str(error) or type(error).__name__}); get it again"
            ) from None


def _read_stream(path: Path, stream: BinaryIO, dimensions: int, most: int) -> Array:
    """Read an array from a stream that can hold at most so many bytes."""
    magic = stream.read(4)
    expected = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if magic != expected:
        raise DataError(
            f"{path} begins with {magic.hex(' ') or 'nothing'}; an idx file of {dimensions}-"
            f"dimensional unsigned bytes begins with {expected.hex(' ')}"
        )
    header = stream.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(f"{path} ends inside its header; get it again")
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
    count = math.prod(shape)
    if count == 0:
        raise DataError(f"{path} is empty: its header says {'x'.join(map(str, shape))}")
    # One byte more than needed shows whether something follows, however long the stream is.
    content = stream.read(min(count, most) + 1)
    if len(content) != count:
        problem = f"only {len(content)}" if len(content) < count else "more"
        raise DataError(
            f"{path} should hold {count} values ({'x'.join(map(str, shape))}) but has {problem}; "
            f"get it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()
