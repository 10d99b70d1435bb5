"""idx files, plain and gzipped, whole and damaged."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esper.lab.tasks.data.arrays import (
    FASHION_MEAN,
    FASHION_MNIST,
    FASHION_STD,
    read_array,
    read_fashion,
)
from esper.leyline.errors import DataError
from tests.lab.tasks.conftest import idx_bytes, write_idx


@pytest.mark.parametrize("gzipped", [True, False])
def test_round_trip(tmp_path: Path, gzipped: bool) -> None:
    source = read_fashion(FASHION_MNIST.find(write_idx(tmp_path / "fashion-mnist", gzipped)))
    assert source.x.shape == (30, 1, 28, 28)
    assert source.x_test is not None
    assert source.x_test.shape == (10, 1, 28, 28)
    assert source.y is not None
    assert source.y.tolist() == [index % 10 for index in range(30)]
    expected = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    assert np.array_equal(source.x[:, 0], expected)


def test_the_dotted_spelling_is_found(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "fashion-mnist", gzipped=False)
    for path in list(folder.iterdir()):
        path.rename(folder / path.name.replace("-idx", ".idx"))
    assert read_fashion(FASHION_MNIST.find(folder)).x.shape == (30, 1, 28, 28)


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x08\x01" + bytes(8), "begins with 00 00 08 01; an idx file of 3-"),
        (b"PK\x03\x04rest", "begins with 50 4b 03 04"),
        (idx_bytes(IMAGES)[:10], "ends inside its header"),
        (idx_bytes(IMAGES)[:-1], r"should hold 24 values \(2x3x4\) but has only 23"),
        (idx_bytes(IMAGES) + b"x", "but has more"),
        (idx_bytes(IMAGES[:0]), "is empty: its header says 0x3x4"),
    ],
)
@pytest.mark.parametrize("gzipped", [True, False])
def test_damage_is_named(tmp_path: Path, content: bytes, words: str, gzipped: bool) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    with pytest.raises(DataError, match=words) as caught:
        read_array(path, dimensions=3)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [5, 20, -9, -1])
def test_a_truncated_gzip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES))[:keep])
    with pytest.raises(DataError, match="cut off or damaged"):
        read_array(path, dimensions=3)


def test_a_damaged_gzip(tmp_path: Path) -> None:
    content = bytearray(
        gzip.compress(idx_bytes(np.arange(4096, dtype=np.uint8).reshape(4, 32, 32)))
    )
    content[30] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_array(path, dimensions=3)


def test_label_count_mismatch(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "fashion-mnist")
    labels = idx_bytes(np.zeros(29, dtype=np.uint8))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(DataError, match="training part has 30 samples but 29 labels"):
        read_fashion(FASHION_MNIST.find(folder))


def test_missing_says_how_to_get_it(no_data: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz.*zalandoresearch") as caught:
        FASHION_MNIST.find()
    assert str(no_data) in str(caught.value)


def test_idx_files_in_a_folder_of_another_name_may_be_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path)
    monkeypatch.setattr("esper.lab.tasks.data.source.data_roots", lambda: (tmp_path,))
    with pytest.raises(DataError, match="was not found"):
        FASHION_MNIST.find()
    assert FASHION_MNIST.find(tmp_path).folder == tmp_path


def test_real_files(real: Callable[[Callable[[], object]], None]) -> None:
    real(FASHION_MNIST.find)
    source = read_fashion(FASHION_MNIST.find())
    assert source.x.shape == (60_000, 1, 28, 28)
    assert source.y is not None
    assert np.bincount(source.y).tolist() == [6000] * 10
    assert source.x.mean() / 255 == pytest.approx(FASHION_MEAN, abs=1e-4)
    assert source.x.std() / 255 == pytest.approx(FASHION_STD, abs=1e-4)


@pytest.mark.parametrize("gzipped", [True, False])
def test_a_header_that_claims_more_than_the_file_holds_takes_no_memory(
    tmp_path: Path, gzipped: bool
) -> None:
    content = bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"few"
    (tmp_path / "a").write_bytes(gzip.compress(content) if gzipped else content)
    with pytest.raises(DataError, match="but has only 3"):
        read_array(tmp_path / "a", dimensions=3)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DataError, match="pipe or a device"):
        read_array(tmp_path / "a", dimensions=3)
