"""CIFAR-10 in its three layouts: the same images come out of each."""

from __future__ import annotations

import collections
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.lab.tasks.data.cifar import CIFAR, PACKED, _read_packed, read_batch, read_cifar
from esper.leyline.errors import DataError
from tests.lab.tasks.conftest import (
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
    source = read_cifar(CIFAR.find(tmp_path))
    arrays = cifar_arrays()
    train = np.concatenate([pixels for name, (pixels, _) in arrays.items() if name[0] == "d"])
    assert np.array_equal(source.x, train.reshape(-1, 3, 32, 32))
    assert source.x_test is not None
    assert np.array_equal(source.x_test, arrays["test_batch"][0].reshape(-1, 3, 32, 32))
    assert source.y is not None
    assert source.y.tolist() == [label for _ in range(5) for label in arrays["test_batch"][1]]


def test_missing_says_what_where_and_how(no_data: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-10 was not found.*data_batch_1.*kriz/cifar") as it:
        CIFAR.find()
    assert str(no_data) in str(it.value)
    assert "\n" not in str(it.value)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_cifar_python(tmp_path / "cifar-10-batches-py") / "data_batch_3").unlink()
    with pytest.raises(DataError, match="lack data_batch_3"):
        CIFAR.find(tmp_path)


@pytest.mark.parametrize("size", [0, 3072, 3073 * 2 - 1])
def test_a_truncated_binary_batch(tmp_path: Path, size: int) -> None:
    folder = write_cifar_binary(tmp_path / "b")
    (folder / "data_batch_2.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"data_batch_2.bin has \d+ bytes.*records of 3073"):
        read_cifar(CIFAR.find(folder))


def test_a_label_out_of_range(tmp_path: Path) -> None:
    folder = write_cifar_binary(tmp_path / "b")
    (folder / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match="test part has labels from 10 to 10"):
        read_cifar(CIFAR.find(folder))


def test_a_packed_file_with_other_members(tmp_path: Path) -> None:
    folder = write_cifar_packed(tmp_path / "p")
    np.savez(folder / "cifar10_test.npz", x=np.zeros(3))
    with pytest.raises(DataError, match="has the members x; a packed CIFAR-10 file has y and q1"):
        read_cifar(CIFAR.find(folder))
    np.savez(folder / "cifar10_test.npz", y=np.zeros(3), q1=np.zeros((3, 3, 32, 31), np.uint8))
    with pytest.raises(DataError, match="expected uint8 of shape"):
        read_cifar(CIFAR.find(folder))


def test_real_test_images_decode_exactly(real: Callable[[Callable[[], object]], None]) -> None:
    real(CIFAR.find)
    found = CIFAR.find()
    if found.layout is not PACKED:
        pytest.skip("the checksum is that of the packed pair, but another layout was found first")
    x, y = _read_packed(found.files[1])
    digest = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    assert digest == "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56"
    assert np.bincount(y).tolist() == [1000] * 10


PIXELS = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)


def write(path: Path, content: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("as_bytes", [True, False])
def test_every_protocol(tmp_path: Path, protocol: int, as_bytes: bool) -> None:
    keys = (b"data", b"labels") if as_bytes else ("data", "labels")
    path = write(tmp_path / "batch", {keys[0]: PIXELS, keys[1]: [3, 4]}, protocol)
    pixels, labels = read_batch(path)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, PIXELS)
    assert labels.tolist() == [3, 4]


def test_a_python_2_pickle(tmp_path: Path) -> None:
    """Byte strings as Python 2 wrote them, with the module names of its numpy."""
    raw = PIXELS.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I2\nI3072\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
        b"I00\nT" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x03K\x04eu.")
    pixels, labels = read_batch(path)
    assert np.array_equal(pixels, PIXELS)
    assert labels.tolist() == [3, 4]


class Attack:
    """Would create a file, if unpickling called what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "pwned"
    path = write(tmp_path / "batch", {b"data": Attack(mark), b"labels": [0]})
    with pytest.raises(DataError, match=r"asks for (posix|nt)\.system, which is refused"):
        read_batch(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"c__builtin__\ngetattr\n(cnumpy\nndarray\nS'tofile'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'zip'\ntR.",
    ],
)
def test_no_other_function_is_reachable(tmp_path: Path, opcodes: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(opcodes)
    with pytest.raises(DataError, match="not a whole CIFAR-10 python batch"):
        read_batch(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list"),
        ({b"data": PIXELS}, "no list of whole numbers under 'labels'"),
        ({b"data": PIXELS, b"labels": [1, "2"]}, "no list of whole numbers"),
        ({b"data": PIXELS, b"labels": [1]}, "2 images but 1 labels"),
        ({b"labels": [1]}, "no array of unsigned bytes under 'data'"),
        ({b"data": PIXELS.astype(np.float32), b"labels": [1, 2]}, "no array of unsigned bytes"),
        ({b"data": np.asfortranarray(PIXELS), b"labels": [1, 2]}, "no array of unsigned bytes"),
        ({b"data": PIXELS[:, :100].copy(), b"labels": [1, 2]}, "expected a multiple of 3072"),
        ({b"data": collections.OrderedDict(), b"labels": [1]}, "which is refused"),
    ],
)
def test_wrong_content(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_batch(write(tmp_path / "batch", content))
    assert str(tmp_path / "batch") in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 10, 200, -1])
def test_a_truncated_pickle(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "batch", {b"data": PIXELS, b"labels": [3, 4]})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="not a whole CIFAR-10 python batch"):
        read_batch(path)


def test_noise_is_an_error_in_one_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for number in range(200):
        path = tmp_path / f"batch{number}"
        path.write_bytes(rng.bytes(64))
        with pytest.raises(DataError) as caught:
            read_batch(path)
        assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    "data",
    [
        # A key of a hundred thousand tuples within each other crashed whoever hashed it.
        b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x0f}.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0fx.",
        b"\x80\x02\x82\x01.",
        b"L" + b"9" * 5000 + b"L\n.",
    ],
    ids=["deep key", "deep list", "memo", "frame", "bytes", "extension", "digits"],
)
def test_a_hostile_pickle_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "batch").write_bytes(data)
    with pytest.raises(DataError, match="is not a whole CIFAR-10 python batch"):
        read_batch(tmp_path / "batch")


def test_keys_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    content = {b"\xff\xfe": 1, b"data": PIXELS, b"labels": [1] * 2}
    pixels, labels = read_batch(write(tmp_path / "batch", content))
    assert pixels.shape == PIXELS.shape
    assert labels.tolist() == [1] * 2


@pytest.mark.parametrize("label", [-1, 10, 2**70])
def test_labels_are_checked_at_load(tmp_path: Path, label: int) -> None:
    content = {b"data": PIXELS, b"labels": [label] * 2}
    with pytest.raises(DataError, match="do not lie in 0 to 9"):
        read_batch(write(tmp_path / "batch", content))


def test_a_batch_that_is_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "batch")
    with pytest.raises(DataError, match="pipe or a device"):
        read_batch(tmp_path / "batch")
