"""Readers of idx files (MNIST and Fashion-MNIST, plain or gzipped) and of npz files.

Header: two zero bytes, a byte for the element type (8 is unsigned byte), a byte for the number of
dimensions, then each dimension as a big-endian 32-bit number; the elements follow.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from esper.lab.tasks.data.source import Array, DataSet, Found, Layout, Source, data_file
from esper.leyline.errors import DataError

UNSIGNED_BYTE = 8
_MOST_EXPANSION = 1100
"""Largest compression ratio of a gzipped file; the format's own limit is 1032."""
# Statistics of the 60,000 training images of Fashion-MNIST, divided by 255.
FASHION_MEAN, FASHION_STD = 0.2860, 0.3530
HOW_TO_GET = (
    "get the four idx gz files from https://github.com/zalandoresearch/fashion-mnist "
    "(folder data/fashion) and put them into a folder fashion-mnist"
)


def _names(stem: str, dimensions: int) -> tuple[str, ...]:
    """Return the usual names of one idx file, the official one first."""
    plain = (f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte")
    return (f"{plain[0]}.gz", plain[0], plain[1], f"{plain[1]}.gz")


FILES = (
    _names("train-images", 3),
    _names("train-labels", 1),
    _names("t10k-images", 3),
    _names("t10k-labels", 1),
)
# MNIST has the same file names, so only the name of the folder, or the user, can tell which it is.
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
    """Read an array from a stream of at most `most` bytes."""
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
    # One byte more than needed shows whether more data follows.
    content = stream.read(min(count, most) + 1)
    if len(content) != count:
        problem = f"only {len(content)}" if len(content) < count else "more"
        raise DataError(
            f"{path} should hold {count} values ({'x'.join(map(str, shape))}) but has {problem}; "
            f"get it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


# ---- A user's own arrays in one numpy `.npz` file


MEMBERS = "x_train, y_train or x, y, and optionally x_val, y_val and x_test, y_test"
WANTED = ("x_train", "y_train", "x", "y", "x_val", "y_val", "x_test", "y_test")
CHANNEL_COUNTS = (1, 3, 4)


def open_npz(
    path: Path, is_wanted: Callable[[str], bool]
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Return the wanted arrays of an npz file, and the names of all; no code in it is run."""
    with data_file(path) as file:
        # zipfile, the decompressors and numpy raise many kinds of errors on a damaged file, from
        # NotImplementedError (compression) to RuntimeError (encryption) and SyntaxError.
        try:
            with np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
                return {n: archive[n] for n in archive.files if is_wanted(n)}, tuple(archive.files)
        except Exception as error:
            detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DataError(
                f"{path} cannot be read as an npz file ({detail}); write plain numeric arrays "
                f"with numpy.savez"
            ) from None


def read_npz(path: Path) -> Source:
    """Return the arrays of an npz file."""
    arrays, members = open_npz(path, WANTED.__contains__)
    suffix = "_train" if "x_train" in arrays else ""
    names = (f"x{suffix}", f"y{suffix}")
    if not all(name in arrays for name in names):
        found = ", ".join(members[:20]) or "none"
        raise DataError(f"{path} has the members {found}; expected {MEMBERS}")
    y = _targets(path, names[1], arrays[names[1]])
    is_class = y.dtype.kind != "f"
    others: dict[str, Array] = {}
    for x_name, y_name in (("x_val", "y_val"), ("x_test", "y_test")):
        if (x_name in arrays) != (y_name in arrays):
            raise DataError(f"{path} has only one of {x_name} and {y_name}; give both or none")
        if x_name not in arrays:
            continue
        others[x_name] = _samples(path, x_name, arrays[x_name])
        others[y_name] = _targets(path, y_name, arrays[y_name])
        if (others[y_name].dtype.kind != "f") != is_class:
            raise DataError(
                f"{path}: {names[1]} and {y_name} must both be whole numbers or both real"
            )
    return Source(
        name=path.stem,
        origin=str(path),
        x=_samples(path, names[0], arrays[names[0]]),
        y=y,
        x_val=others.get("x_val"),
        y_val=others.get("y_val"),
        x_test=others.get("x_test"),
        y_test=others.get("y_test"),
        num_classes=int(y.max()) + 1 if is_class and y.size else None,
    )


def _samples(path: Path, name: str, x: Array) -> Array:
    """Return samples as uint8 or float32 in [N, F] or [N, C, H, W]."""
    if x.dtype.kind not in "buif":
        raise DataError(f"{path}: {name} has type {x.dtype}; expected numbers")
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in CHANNEL_COUNTS and x.shape[3] in CHANNEL_COUNTS:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim not in (2, 4):
        raise DataError(
            f"{path}: {name} has shape {x.shape}; expected [N, F], [N, H, W], [N, C, H, W] "
            f"or [N, H, W, C]"
        )
    return x


def _targets(path: Path, name: str, y: Array) -> Array:
    """Return labels as int64 [N], or real targets as float32 [N, K]."""
    if y.dtype.kind in "iub":
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1:
            raise DataError(f"{path}: {name} has shape {y.shape}; labels are [N]")
        if y.dtype == np.uint64 and len(y) and int(y.max()) >= 2**63:
            raise DataError(f"{path}: {name} has the label {int(y.max())}, larger than any can be")
        return y.astype(np.int64)
    if y.dtype.kind == "f" and y.ndim in (1, 2):
        return y.astype(np.float32).reshape(len(y), -1)
    raise DataError(
        f"{path}: {name} has type {y.dtype} and shape {y.shape}; expected whole-number labels [N] "
        f"or real targets [N] or [N, K]"
    )
