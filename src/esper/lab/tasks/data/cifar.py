"""CIFAR-10 in three layouts: python batches, binary batches, packed npz pair.

The packed pair holds differences modulo 256 (channels R-G, G, B-G, differenced along width and then
along height), which compress well and decode exactly.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.lab.tasks.data.arrays import open_npz
from esper.lab.tasks.data.source import Array, DataSet, Found, Layout, Source, data_file
from esper.leyline.errors import DataError

_CONTAINERS = frozenset(
    {
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "EMPTY_LIST", "DICT", "EMPTY_DICT"),
        *("EMPTY_SET", "FROZENSET", "REDUCE", "BUILD"),
    }
)
_MOST_CONTAINERS = 200
"""Most containers in a batch, which has about a dozen; deep nesting would overflow the stack."""
_REFUSED = frozenset({"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID"})
_REFUSED_PREFIX = "EXT"
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "FRAME"})
_MOST_BYTES = 2**28


class _Record:
    """Replaces an array or a dtype: keeps its arguments and its state, and does nothing else."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Marker:
    """Replaces the class `numpy.ndarray`, which pickles pass as an argument."""


def _latin1(text: Any, encoding: Any) -> bytes:
    """Replace `_codecs.encode`, by which Python 3 writes bytes into an old pickle."""
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


def _look_through(data: bytes) -> None:
    """Raise for a pickle that nests too deeply, claims too much memory, or is not a batch.

    Only the opcodes are read; no object is built.
    """
    containers = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _REFUSED or name.startswith(_REFUSED_PREFIX):
            raise pickle.UnpicklingError(f"it has {name}, which is refused")
        containers += name in _CONTAINERS
        if containers > _MOST_CONTAINERS:
            raise pickle.UnpicklingError("it is nested far more than a batch is")
        if name in _MEMO and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"{name} {argument} is beyond its size")


def read_batch(path: Path) -> tuple[Array, Array]:
    """Return pixels [N, 3072] uint8 and labels [N] of one python batch."""
    with data_file(path) as file:
        data = file.read(_MOST_BYTES + 1)
    try:
        if len(data) > _MOST_BYTES:
            raise pickle.UnpicklingError("it is far larger than a batch")
        _look_through(data)
        content = _PassiveUnpickler(io.BytesIO(data), encoding="bytes").load()
    # A damaged pickle may make the unpickler raise any error.
    except Exception as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{path} is not a whole CIFAR-10 python batch ({detail}); "
            f"unpack cifar-10-python.tar.gz again"
        ) from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; a CIFAR-10 batch holds a dict")
    # Python 2 wrote the keys as bytes; a batch rewritten by Python 3 has text.
    fields = {
        key.decode("latin1") if isinstance(key, bytes) else key: content[key] for key in content
    }
    pixels, labels = _pixels(path, fields.get("data")), fields.get("labels")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path} has no list of whole numbers under 'labels'; expected one per row")
    if len(labels) != len(pixels):
        raise DataError(f"{path} has {len(pixels)} images but {len(labels)} labels; as many needed")
    if not all(0 <= label < NUM_CLASSES for label in labels):
        raise DataError(f"{path} has labels that do not lie in 0 to {NUM_CLASSES - 1}")
    return pixels, np.array(labels, dtype=np.int64)


def _pixels(path: Path, record: Any) -> Array:
    """Build the array from its record in the pickle."""
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


NUM_CLASSES = 10
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PIXELS = 3 * 32 * 32
HOW_TO_GET = (
    "get cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it"
)

BATCH_NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
PYTHON = Layout(
    "CIFAR-10 python batches", tuple((name,) for name in BATCH_NAMES), ("cifar-10-batches-py",)
)
BINARY = Layout(
    "CIFAR-10 binary batches",
    tuple((f"{name}.bin",) for name in BATCH_NAMES),
    ("cifar-10-batches-bin",),
)
PACKED = Layout(
    "CIFAR-10 packed pair",
    (("cifar10_train.npz",), ("cifar10_test.npz",)),
    ("cifar10", "cifar-10"),
)
LAYOUTS = (PYTHON, BINARY, PACKED)


def read_cifar(found: Found) -> Source:
    """Return CIFAR-10 as images [N, 3, 32, 32] in the official order, with its test split."""
    if found.layout is PACKED:
        (x, y), (x_test, y_test) = (_read_packed(path) for path in found.files)
    else:
        read = read_batch if found.layout is PYTHON else _read_binary
        parts = [read(path) for path in found.files]
        x = np.concatenate([part[0] for part in parts[:-1]]).reshape(-1, 3, 32, 32)
        y = np.concatenate([part[1] for part in parts[:-1]])
        x_test, y_test = parts[-1][0].reshape(-1, 3, 32, 32), parts[-1][1]
    return Source(
        name="CIFAR-10",
        origin=str(found.folder),
        x=x,
        y=y.astype(np.int64),
        x_test=x_test,
        y_test=y_test.astype(np.int64),
        num_classes=NUM_CLASSES,
        scale=255.0,
        mean=MEAN,
        std=STD,
    )


CIFAR = DataSet("CIFAR-10", LAYOUTS, HOW_TO_GET, read_cifar)


def _read_binary(path: Path) -> tuple[Array, Array]:
    """Return pixels [N, 3072] and labels [N] of one file of records: a label, then the pixels."""
    with data_file(path) as file:
        raw = np.frombuffer(file.read(), dtype=np.uint8)
    if raw.size == 0 or raw.size % (PIXELS + 1):
        raise DataError(
            f"{path} has {raw.size} bytes, which is no whole number of records of {PIXELS + 1} "
            f"bytes; it is damaged or cut off: {HOW_TO_GET}"
        )
    records = raw.reshape(-1, PIXELS + 1)
    return np.ascontiguousarray(records[:, 1:]), records[:, 0]


def _read_packed(path: Path) -> tuple[Array, Array]:
    """Return images [N, 3, 32, 32] and labels [N] of one packed file."""
    arrays, members = open_npz(path, lambda name: name == "y" or name.startswith("q"))
    parts = sorted(name for name in arrays if name.startswith("q"))
    if "y" not in arrays or not parts:
        raise DataError(
            f"{path} has the members {', '.join(members[:20]) or 'none'}; "
            f"a packed CIFAR-10 file has y and q1, q2, ..."
        )
    for name in parts:
        shape = arrays[name].shape
        if arrays[name].dtype != np.uint8 or (*shape[:1], *shape[2:]) != (3, 32, 32):
            raise DataError(
                f"{path}: {name} is {arrays[name].dtype} of shape {shape}; "
                f"expected uint8 of shape (3, N, 32, 32)"
            )
    if arrays["y"].ndim != 1 or arrays["y"].dtype.kind not in "iu":
        raise DataError(f"{path}: y must be a list of whole-number labels, got {arrays['y'].dtype}")
    # One part after another, so that the whole is not in memory twice. PyTorch adds up bytes faster
    # than numpy, several times.
    images = np.empty((sum(arrays[name].shape[1] for name in parts), 3, 32, 32), dtype=np.uint8)
    first = 0
    for name in parts:
        planes = torch.from_numpy(arrays.pop(name))
        planes = planes.cumsum(-1, dtype=torch.uint8).cumsum(-2, dtype=torch.uint8)
        planes[::2] += planes[1]
        images[first : first + planes.shape[1]] = planes.swapaxes(0, 1)
        first += planes.shape[1]
    return images, arrays["y"]
