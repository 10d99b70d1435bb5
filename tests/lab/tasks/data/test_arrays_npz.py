"""A user's own arrays."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.lab.tasks.data.arrays import open_npz, read_npz
from esper.leyline.errors import DataError

X = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
Y = np.array([0, 1, 2, 0, 1, 2])


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_the_keras_names(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3])
    source = read_npz(path)
    assert source.x.shape == (6, 1, 4, 4)
    assert source.x.dtype == np.uint8
    assert source.x_test is not None
    assert source.x_test.shape == (3, 1, 4, 4)
    assert source.num_classes == 3
    assert source.target == "class"


def test_the_plain_names_and_a_column_of_labels(tmp_path: Path) -> None:
    source = read_npz(save(tmp_path / "a.npz", x=X.reshape(6, 16).astype(float), y=Y[:, None]))
    assert source.x.dtype == np.float32
    assert source.kind == "features"
    assert source.y is not None
    assert source.y.shape == (6,)


def test_channels_last_becomes_channels_first(tmp_path: Path) -> None:
    last = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    source = read_npz(save(tmp_path / "a.npz", x=last, y=Y))
    assert np.array_equal(source.x, last.transpose(0, 3, 1, 2))
    first = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    assert np.array_equal(read_npz(save(tmp_path / "b.npz", x=first, y=Y)).x, first)


def test_real_targets_make_it_regression(tmp_path: Path) -> None:
    source = read_npz(save(tmp_path / "a.npz", x=X.reshape(6, 16), y=Y / 2))
    assert source.target == "real"
    assert source.num_classes is None
    assert source.y is not None
    assert source.y.shape == (6, 1)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": X}, "has the members images; expected x_train, y_train or x, y"),
        ({"x_train": X, "y": Y}, "expected x_train, y_train"),
        ({"x": X, "y": Y, "x_test": X}, "only one of x_test and y_test"),
        ({"x": X, "y": Y, "y_val": Y}, "only one of x_val and y_val"),
        ({"x": X, "y": Y, "x_val": X[:, :2], "y_val": Y}, "4x4 but validation samples 1x2x4"),
        ({"x": X, "y": Y[:4]}, "6 samples but 4 labels"),
        ({"x": X, "y": Y - 1}, "labels from -1 to 1"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y + 3}, "labels from 3 to 5"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y / 2}, "both be whole numbers or both real"),
        ({"x": X[:0], "y": Y[:0]}, "is empty"),
        ({"x": np.zeros(6), "y": Y}, r"x has shape \(6,\)"),
        ({"x": X, "y": np.eye(3, dtype=int)[Y]}, r"y has shape \(6, 3\); labels are \[N\]"),
        ({"x": X, "y": np.array(list("abcabc"))}, "whole-number labels"),
        ({"x": np.array([b"x"] * 6), "y": Y}, "expected numbers"),
        ({"x": np.array([{}] * 6), "y": Y}, "plain numeric arrays"),
        ({"x": np.full((6, 2), np.nan), "y": Y}, "NaN or infinite"),
    ],
)
def test_wrong_content(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_an_npz_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"not a zip file")
    with pytest.raises(DataError, match="as an npz file"):
        open_npz(path, bool)


@pytest.mark.parametrize("keep", [50, 200, -30])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError):
        open_npz(path, bool)


def test_a_damaged_member(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        open_npz(path, bool)


# ----------------------------------------------------------------------------------- hostile files


def npy_header(shape: tuple[int, ...], kind: str = "<f8") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_a_member_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy_header((10**9, 10**6)) + b"few")
        archive.writestr("y.npy", npy_header((3,)) + bytes(24))
    with pytest.raises(DataError, match="cannot be read"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(-1, 3), (10**30,)])
def test_an_impossible_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy_header(shape))
        archive.writestr("y.npy", npy_header((3,)) + bytes(24))
    with pytest.raises(DataError, match="cannot be read"):
        read_npz(tmp_path / "a.npz")


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("notes.npy", npy_header((10**9, 10**6)))
    assert read_npz(tmp_path / "a.npz").num_classes == 3


def test_encryption_and_unknown_compression_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y)
    data = bytearray(path.read_bytes())
    for marker, flag_at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = 0
        while (start := data.find(marker, start)) >= 0:
            data[start + flag_at] |= 1
            start += 4
    (tmp_path / "secret.npz").write_bytes(bytes(data))
    with pytest.raises(DataError, match="encrypted"):
        read_npz(tmp_path / "secret.npz")
    data = bytearray(path.read_bytes())
    for marker, method_at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = 0
        while (start := data.find(marker, start)) >= 0:
            data[start + method_at] = 97
            start += 4
    (tmp_path / "odd.npz").write_bytes(bytes(data))
    with pytest.raises(DataError, match="compression"):
        read_npz(tmp_path / "odd.npz")


def test_labels_beyond_any_number_of_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=np.array([0, 1, 2, 0, 1, 2**62]))
    with pytest.raises(DataError, match="number the classes from 0"):
        read_npz(path)
    path = save(tmp_path / "b.npz", x=X, y=np.array([0, 1, 2, 0, 1, 2**64 - 1], dtype=np.uint64))
    with pytest.raises(DataError, match="label 18446744073709551615, larger than any can be"):
        read_npz(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="pipe or a device"):
        read_npz(tmp_path / "pipe.npz")
