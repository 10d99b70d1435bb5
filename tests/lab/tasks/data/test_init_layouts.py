"""`open_data` tells the layouts apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from esper.lab.tasks.data import open_data
from esper.leyline.errors import DataError
from tests.lab.tasks.conftest import (
    write_cifar_binary,
    write_cifar_packed,
    write_cifar_python,
    write_idx,
)


def write_npz(path: Path) -> Path:
    np.savez(path, x=np.zeros((8, 5), np.float32), y=np.arange(8) % 2)
    return path


def test_folders(tmp_path: Path) -> None:
    assert open_data(write_cifar_python(tmp_path / "a")).name == "CIFAR-10"
    assert open_data(write_cifar_binary(tmp_path / "b")).name == "CIFAR-10"
    assert open_data(write_cifar_packed(tmp_path / "c")).name == "CIFAR-10"
    assert open_data(write_idx(tmp_path / "d")).x.shape == (30, 1, 28, 28)
    (tmp_path / "e").mkdir()
    write_npz(tmp_path / "e" / "mine.npz")
    assert open_data(tmp_path / "e").name == "mine"
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "book.txt").write_text("words " * 50, encoding="utf-8")
    assert open_data(tmp_path / "f", context=9).x.shape == (30, 10)


def test_files(tmp_path: Path) -> None:
    assert open_data(write_npz(tmp_path / "mine.npz")).kind == "features"
    assert open_data(write_cifar_python(tmp_path / "a") / "data_batch_1").name == "CIFAR-10"
    assert open_data(write_cifar_packed(tmp_path / "c") / "cifar10_test.npz").name == "CIFAR-10"
    idx_file = write_idx(tmp_path / "d") / "t10k-labels-idx1-ubyte.gz"
    assert open_data(str(idx_file)).x.shape == (30, 1, 28, 28)
    (tmp_path / "book.txt").write_text("words " * 50, encoding="utf-8")
    assert open_data(tmp_path / "book.txt", context=9).x.shape == (30, 10)


def test_several_data_sets_in_one_folder(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz")
    write_npz(tmp_path / "b.npz")
    with pytest.raises(DataError, match=r"several data sets \(a.npz, b.npz\); name the one"):
        open_data(tmp_path)


def test_an_incomplete_folder_names_the_missing_file(tmp_path: Path) -> None:
    folder = write_cifar_binary(tmp_path / "b")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"lack test_batch\.bin"):
        open_data(folder)
    with pytest.raises(DataError, match=r"lack test_batch\.bin"):
        open_data(folder / "data_batch_1.bin")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar-10-python.tar.gz", "is an archive; unpack it"),
        ("table.csv", "in no known layout; known: CIFAR-10 batches"),
    ],
)
def test_files_it_cannot_read(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"1,2,3")
    with pytest.raises(DataError, match=words):
        open_data(tmp_path / name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_data(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no known data"):
        open_data(tmp_path)
