"""CIFAR-10 in its three layouts: the same images come out of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import DataError
from esper.tasks.data.cifar import PACKED, _read_packed, find_cifar, read_cifar
from tests.tasks.conftest import (
    cifar_arrays,
    write_cifar_binary,
    write_cifar_packed,
    write_cifar_python,
)

WRITERS = {
    "cifar-10-batches-py": write_cifar_python,
    "cifar-10-batches-bin": write_cifar_binary,
    "cifar10": write_cifar_packed,
}


@pytest.mark.parametrize("folder", WRITERS)
def test_each_layout_gives_the_same_images(tmp_path: Path, folder: str) -> None:
    WRITERS[folder](tmp_path / folder)
    source = read_cifar(find_cifar(tmp_path))
    arrays = cifar_arrays()
    train = np.concatenate([pixels for name, (pixels, _) in arrays.items() if name[0] == "d"])
    assert np.array_equal(source.x, train.reshape(-1, 3, 32, 32))
    assert source.x_test is not None
    assert np.array_equal(source.x_test, arrays["test_batch"][0].reshape(-1, 3, 32, 32))
    assert source.y is not None
    assert source.y.tolist() == [label for _ in range(5) for label in arrays["test_batch"][1]]


def test_missing_says_what_where_and_how(no_data: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-10 was not found.*data_batch_1.*kriz/cifar") as it:
        find_cifar()
    assert str(no_data) in str(it.value)
    assert "\n" not in str(it.value)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_cifar_python(tmp_path / "cifar-10-batches-py") / "data_batch_3").unlink()
    with pytest.raises(DataError, match="lack data_batch_3"):
        find_cifar(tmp_path)


@pytest.mark.parametrize("size", [0, 3072, 3073 * 2 - 1])
def test_a_truncated_binary_batch(tmp_path: Path, size: int) -> None:
    folder = write_cifar_binary(tmp_path / "b")
    (folder / "data_batch_2.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"data_batch_2.bin has \d+ bytes.*records of 3073"):
        read_cifar(find_cifar(folder))


def test_a_label_out_of_range(tmp_path: Path) -> None:
    folder = write_cifar_binary(tmp_path / "b")
    (folder / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match="test part has labels from 10 to 10"):
        read_cifar(find_cifar(folder))


def test_a_packed_file_with_other_members(tmp_path: Path) -> None:
    folder = write_cifar_packed(tmp_path / "p")
    np.savez(folder / "cifar10_test.npz", x=np.zeros(3))
    with pytest.raises(DataError, match="has the members x; a packed CIFAR-10 file has y and q1"):
        read_cifar(find_cifar(folder))
    np.savez(folder / "cifar10_test.npz", y=np.zeros(3), q1=np.zeros((3, 3, 32, 31), np.uint8))
    with pytest.raises(DataError, match="expected uint8 of shape"):
        read_cifar(find_cifar(folder))


def test_real_test_images_decode_exactly(real: Callable[[Callable[[], object]], None]) -> None:
    real(find_cifar)
    found = find_cifar()
    if found.layout is not PACKED:
        pytest.skip("the checksum is that of the packed pair, but another layout was found first")
    x, y = _read_packed(found.files[1])
    digest = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    assert digest == "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56"
    assert np.bincount(y).tolist() == [1000] * 10
