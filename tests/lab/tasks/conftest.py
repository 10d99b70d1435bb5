"""Small files in the real layouts, and real data where this machine has it."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.lab.tasks.data.cifar import BATCH_NAMES
from esper.leyline.errors import DataError

Bytes = NDArray[np.uint8]


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only place where data is looked for."""
    home = tmp_path / "nothing" / "here"
    home.mkdir(parents=True)
    monkeypatch.setattr("esper.lab.tasks.data.source.data_roots", lambda: (home,))
    monkeypatch.setattr("esper.lab.tasks.data.text.data_roots", lambda: (home,))
    return home


@pytest.fixture
def real() -> Callable[[Callable[[], object]], None]:
    """Skip the test, with the reason, unless a finder finds its data."""

    def require(find: Callable[[], object]) -> None:
        try:
            find()
        except DataError as error:
            pytest.skip(f"real data is absent: {error}")

    return require


def idx_bytes(array: Bytes) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_idx(folder: Path, gzipped: bool = True, count: int = 30, classes: int = 10) -> Path:
    """Write four idx files of random 28x28 images; labels run through the classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, size in (("train", count), ("t10k", count // 3)):
        images = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        labels = (np.arange(size) % classes).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            content = idx_bytes(array)
            if gzipped:
                (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{name}-ubyte").write_bytes(content)
    return folder


def cifar_arrays(count: int = 20) -> dict[str, tuple[Bytes, list[int]]]:
    """Random pixels [N, 3072] and labels for each of the six batches."""
    rng = np.random.default_rng(1)
    return {
        name: (
            rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            [index % 10 for index in range(count)],
        )
        for name in BATCH_NAMES
    }


def write_cifar_python(folder: Path, protocol: int = 2) -> Path:
    """Write python batches with the official keys."""
    folder.mkdir(parents=True)
    for name, (pixels, labels) in cifar_arrays().items():
        content = {
            b"batch_label": name.encode(),
            b"labels": labels,
            b"data": pixels,
            b"filenames": [b"x.png"] * len(labels),
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


def write_cifar_binary(folder: Path) -> Path:
    """Write binary batches: a label byte, then the pixels."""
    folder.mkdir(parents=True)
    for name, (pixels, labels) in cifar_arrays().items():
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    # The official folder has this note beside the batches; it is not data.
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n", encoding="utf-8")
    return folder


def write_cifar_packed(folder: Path) -> Path:
    """Write the packed pair: colour differences, then differences along both sides."""
    folder.mkdir(parents=True)
    arrays = cifar_arrays()

    def pack(names: tuple[str, ...], path: Path) -> None:
        members: dict[str, Bytes] = {}
        for number, name in enumerate(names, start=1):
            planes = arrays[name][0].reshape(-1, 3, 32, 32).swapaxes(0, 1).copy()
            planes[[0, 2]] -= planes[1]
            planes[..., 1:, :] -= planes[..., :-1, :].copy()
            planes[..., 1:] -= planes[..., :-1].copy()
            members[f"q{number}"] = planes
        labels = np.array([label for name in names for label in arrays[name][1]], dtype=np.uint8)
        np.savez_compressed(path, y=labels, **members)

    pack(BATCH_NAMES[:-1], folder / "cifar10_train.npz")
    pack(BATCH_NAMES[-1:], folder / "cifar10_test.npz")
    return folder
