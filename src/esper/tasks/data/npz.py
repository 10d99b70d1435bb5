"""A user's own arrays in one numpy `.npz` file.

Members are `x_train, y_train` or `x, y`, and optionally `x_test, y_test`. Images are [N, H, W],
[N, C, H, W] or [N, H, W, C] with 1, 3 or 4 channels; features are [N, F]. Whole-number labels make
it classification, real-valued ones regression. Bytes (uint8) are standardised, other numbers
are taken as they are. Members that would need unpickling are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.data.source import Array, Source

MEMBERS = "x_train, y_train or x, y, and optionally x_test, y_test"
CHANNEL_COUNTS = (1, 3, 4)


def open_npz(path: Path) -> dict[str, Array]:
    """Return every array of an npz file, without executing anything in it."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an npz file, or it is cut off; write it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} cannot be read ({detail}); expected plain numeric arrays, as numpy.savez "
            f"writes them"
        ) from None


def read_npz(path: Path) -> Source:
    """Return the arrays of an npz file."""
    arrays = open_npz(path)
    suffix = "_train" if "x_train" in arrays else ""
    names = (f"x{suffix}", f"y{suffix}")
    if not all(name in arrays for name in names):
        raise DataError(f"{path} has the members {', '.join(arrays) or 'none'}; expected {MEMBERS}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has only one of x_test and y_test; give both or none")
    y = _targets(path, names[1], arrays[names[1]])
    has_test = "x_test" in arrays
    y_test = _targets(path, "y_test", arrays["y_test"]) if has_test else None
    is_class = y.dtype.kind != "f"
    if y_test is not None and (y_test.dtype.kind != "f") != is_class:
        raise DataError(f"{path}: {names[1]} and y_test must both be whole numbers or both real")
    return Source(
        name=path.stem,
        origin=str(path),
        x=_samples(path, names[0], arrays[names[0]]),
        y=y,
        x_test=_samples(path, "x_test", arrays["x_test"]) if has_test else None,
        y_test=y_test,
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
        return y.astype(np.int64)
    if y.dtype.kind == "f" and y.ndim in (1, 2):
        return y.astype(np.float32).reshape(len(y), -1)
    raise DataError(
        f"{path}: {name} has type {y.dtype} and shape {y.shape}; expected whole-number labels [N] "
        f"or real targets [N] or [N, K]"
    )
