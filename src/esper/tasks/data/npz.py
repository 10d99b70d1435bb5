"""A user's own arrays in one numpy `.npz` file.

Members are `x_train, y_train` or `x, y`, and optionally `x_val, y_val` and `x_test, y_test`. Images
are [N, H, W], [N, C, H, W] or [N, H, W, C] with 1, 3 or 4 channels; features are [N, F].
Whole-number labels make it classification, real-valued ones regression. Bytes (uint8) are
standardised, other numbers are taken as they are. Members that would need unpickling are refused.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from esper.leyline.errors import DataError
from esper.tasks.data.locate import data_file
from esper.tasks.data.source import Array, Source

MEMBERS = "x_train, y_train or x, y, and optionally x_val, y_val and x_test, y_test"
WANTED = ("x_train", "y_train", "x", "y", "x_val", "y_val", "x_test", "y_test")
CHANNEL_COUNTS = (1, 3, 4)

_MOST_EXPANSION = 1100
"""How much more a compressed member can hold than it takes; deflate's own limit is 1032."""


def open_npz(
    path: Path, is_wanted: Callable[[str], bool]
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Return some arrays of an npz file and the names of all, without executing anything in it.

    A member that is not wanted is not read; one that is has its size compared with the file's
    before memory is taken for it.
    """
    with data_file(path) as file:
        # The border to somebody's file: zipfile, the decompressors and numpy raise what they like,
        # from NotImplementedError (compression) to RuntimeError (encryption) and SyntaxError.
        try:
            archive = zipfile.ZipFile(file)
        except Exception:
            raise DataError(
                f"{path} is not an npz file, or it is cut off; write it with numpy.savez"
            ) from None
        try:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = {name: info for name, info in members.items() if is_wanted(name)}
            arrays = {name: _read_member(archive, info) for name, info in wanted.items()}
        except Exception as error:
            detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DataError(
                f"{path} cannot be read ({detail}); expected plain numeric arrays, as numpy.savez "
                f"writes them"
            ) from None
        return arrays, tuple(members)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    if info.file_size > _MOST_EXPANSION * (info.compress_size + 1):
        raise ValueError(f"{info.filename} says it holds {info.file_size:,} bytes, which it cannot")
    with archive.open(info) as stream:
        size = _array_size(stream, info.filename)
    if size != info.file_size:
        raise ValueError(
            f"{info.filename} says it is an array of {size:,} bytes and holds {info.file_size:,}"
        )
    if size > _memory():
        raise ValueError(f"{info.filename} has {size:,} bytes, more than this machine's memory")
    with archive.open(info) as stream:
        return np.asarray(npy.read_array(stream, allow_pickle=False))


def _array_size(stream: IO[bytes], name: str) -> int:
    """Return how many bytes a member must have to be what its header says."""
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{name} is in version {version} of numpy's format; expected 1.0 or 2.0")
    shape, _, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which would have to be run")
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} has the shape {shape}")
    return stream.tell() + math.prod(shape) * dtype.itemsize


def _memory() -> float:
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_PHYS_PAGES" not in names:
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


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
