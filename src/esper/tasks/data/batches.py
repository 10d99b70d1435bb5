"""CIFAR-10's python batches, which are pickles, read without executing anything in them.

A pickle may name any function and have it called. Here the few names that an array needs are
answered with passive records that only keep what they are given, and every other name is refused;
the array is then put together from the record by this module.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.data.source import Array

PIXELS = 3 * 32 * 32
# What a damaged or foreign pickle makes the unpickler raise.
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
)


class _Record:
    """Stands in for an array or a dtype: keeps its arguments and its state, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Marker:
    """Stands in for the class `numpy.ndarray`, which pickles pass around but need not call."""


def _latin1(text: Any, encoding: Any) -> bytes:
    """Do what Python 3 asks of `_codecs.encode` when it writes bytes into an old pickle."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("unexpected text encoding")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Marker,
    ("numpy", "dtype"): _Record,
    ("numpy.core.multiarray", "_reconstruct"): _Record,
    ("numpy._core.multiarray", "_reconstruct"): _Record,
    ("numpy.core.numeric", "_frombuffer"): _Record,
    ("numpy._core.numeric", "_frombuffer"): _Record,
    ("_codecs", "encode"): _latin1,
}


class _PassiveUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused") from None


def read_batch(path: Path) -> tuple[Array, Array]:
    """Return pixels [N, 3072] uint8 and labels [N] of one python batch."""
    try:
        with path.open("rb") as file:
            content = _PassiveUnpickler(file, encoding="bytes").load()
    except _DAMAGE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} is not a whole CIFAR-10 python batch ({detail}); "
            f"unpack cifar-10-python.tar.gz again"
        ) from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; a CIFAR-10 batch holds a dict")
    # Python 2 wrote the keys as bytes; a batch written again by Python 3 has text.
    fields = {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
    pixels, labels = _pixels(path, fields.get("data")), fields.get("labels")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path} has no list of whole numbers under 'labels'; expected one per row")
    if len(labels) != len(pixels):
        raise DataError(f"{path} has {len(pixels)} images but {len(labels)} labels; as many needed")
    return pixels, np.array(labels, dtype=np.int64)


def _pixels(path: Path, record: Any) -> Array:
    """Put the array together from what the pickle says about it."""
    kind: Any = None
    raw: Any = None
    if isinstance(record, _Record) and isinstance(record.state, tuple) and len(record.state) == 5:
        _, _, kind, is_fortran, raw = record.state
    elif isinstance(record, _Record) and len(record.arguments) == 4:
        raw, kind, _, order = record.arguments
        is_fortran = order != "C"
    is_bytes = isinstance(kind, _Record) and kind.arguments[:1] in (("u1",), (b"u1",))
    if not is_bytes or is_fortran or not isinstance(raw, bytes | bytearray):
        raise DataError(
            f"{path} has no array of unsigned bytes under 'data'; expected N x {PIXELS}"
        )
    if not raw or len(raw) % PIXELS:
        raise DataError(f"{path} has {len(raw)} pixel values; expected a multiple of {PIXELS}")
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, PIXELS).copy()
