"""CIFAR-10 at 16x16 and Fashion-MNIST at 14x14: read, or made from the full images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esper.lab.tasks import presets as small
from esper.lab.tasks.data import arrays as idx
from esper.lab.tasks.data import cifar
from esper.leyline.errors import DataError
from tests.lab.tasks.conftest import write_cifar_python, write_idx


def test_pixels_are_averaged_and_halves_go_to_the_even_neighbour() -> None:
    images = np.array([[0, 0, 1, 1], [0, 2, 1, 3], [0, 1, 254, 255], [1, 0, 255, 254]], np.uint8)
    # Means 0.5, 1.5, 0.5 and 254.5.
    assert small.halve(images[None, None]).tolist() == [[[[0, 2], [0, 254]]]]


def test_averages_are_numpy_s() -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 8, 6), dtype=np.uint8)
    means = images.reshape(50, 3, 4, 2, 3, 2).mean(axis=(3, 5))
    halved = small.halve(images)
    assert halved.dtype == np.uint8
    assert np.array_equal(halved, np.rint(means))


def test_small_images_are_made_from_the_full_ones(tmp_path: Path) -> None:
    full = cifar.read_cifar(cifar.CIFAR.find(write_cifar_python(tmp_path / "cifar")))
    made = small.read_cifar16(small.SMALL_CIFAR.find(tmp_path / "cifar"))
    assert made.x.shape[1:] == small.CIFAR16_SHAPE
    assert np.array_equal(made.x, small.halve(full.x))
    assert made.y is not None
    assert np.array_equal(made.y, full.y)
    clothes = small.read_fashion14(small.SMALL_FASHION.find(write_idx(tmp_path / "idx")))
    assert clothes.x.shape[1:] == small.FASHION14_SHAPE
    assert clothes.x_test is not None
    assert clothes.x_test.shape[1:] == small.FASHION14_SHAPE


def test_the_small_file_comes_first(tmp_path: Path) -> None:
    write_cifar_python(tmp_path / "cifar-10-batches-py")
    x = np.full((40, 3, 16, 16), 7, np.uint8)
    y = np.arange(40) % 10
    np.savez(tmp_path / "cifar16.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    found = small.SMALL_CIFAR.find(tmp_path)
    assert found.layout is small.CIFAR16
    source = small.read_cifar16(found)
    assert (source.x == 7).all()
    assert (source.mean, source.std) == (small.CIFAR16_MEAN, small.CIFAR16_STD)


def test_nothing_at_all_names_both_ways(no_data: Path) -> None:
    with pytest.raises(DataError, match=r"cifar16\.npz.* or .*data_batch_1"):
        small.SMALL_CIFAR.find()
    with pytest.raises(DataError, match=r"fashion14\.npz.* or .*train-images"):
        small.SMALL_FASHION.find()


@pytest.mark.parametrize(
    "arrays",
    [
        {"x_train": np.zeros((9, 3, 8, 8), np.uint8), "x_test": np.zeros((9, 3, 8, 8), np.uint8)},
        {"x_train": np.zeros((9, 3, 16, 16)), "x_test": np.zeros((9, 3, 16, 16))},
        {"x_train": np.zeros((9, 3, 16, 16), np.uint8)},
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    labels = {name.replace("x", "y"): np.arange(9) for name in arrays}
    np.savez(tmp_path / "cifar16.npz", **arrays, **labels)
    with pytest.raises(DataError, match=r"cifar16\.npz should hold .* 3 x 16 x 16; got"):
        small.read_cifar16(small.SMALL_CIFAR.find(tmp_path))


def test_real_small_cifar_is_what_the_full_one_makes(
    real: Callable[[Callable[[], object]], None],
) -> None:
    real(lambda: (cifar.CIFAR.find(), _small_file(small.SMALL_CIFAR.find().layout, small.CIFAR16)))
    read = small.read_cifar16(small.SMALL_CIFAR.find())
    full = cifar.read_cifar(cifar.CIFAR.find())
    assert full.x_test is not None
    assert np.array_equal(read.x, small.halve(full.x[: small.CIFAR16_TRAIN]))
    assert np.array_equal(read.x_test, small.halve(full.x_test))
    assert full.y is not None
    assert np.array_equal(read.y, full.y[: small.CIFAR16_TRAIN])
    pixels = read.x / 255.0
    assert pixels.mean((0, 2, 3)) == pytest.approx(small.CIFAR16_MEAN, abs=1e-4)
    assert pixels.std((0, 2, 3)) == pytest.approx(small.CIFAR16_STD, abs=1e-4)


def test_real_small_fashion_is_what_the_full_one_makes(
    real: Callable[[Callable[[], object]], None],
) -> None:
    real(
        lambda: (
            idx.FASHION_MNIST.find(),
            _small_file(small.SMALL_FASHION.find().layout, small.FASHION14),
        )
    )
    read = small.read_fashion14(small.SMALL_FASHION.find())
    full = idx.read_fashion(idx.FASHION_MNIST.find())
    assert full.x_test is not None
    assert np.array_equal(read.x, small.halve(full.x))
    assert np.array_equal(read.x_test, small.halve(full.x_test))
    pixels = read.x / 255.0
    assert pixels.mean() == pytest.approx(small.FASHION14_MEAN[0], abs=1e-4)
    assert pixels.std() == pytest.approx(small.FASHION14_STD[0], abs=1e-4)


def _small_file(layout: object, wanted: object) -> None:
    if layout is not wanted:
        raise DataError("only the full data set is here")
