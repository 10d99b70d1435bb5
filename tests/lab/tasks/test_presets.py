"""Every preset: the documents' sizes, and the contract on whatever data this machine has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esper.lab.tasks import TASKS, get_task
from esper.lab.tasks.presets import GREY_LEVELS, MEAN, STD, read_digits
from esper.leyline.errors import DataError
from esper.testing import check_task
from tests.lab.tasks.conftest import write_cifar_python, write_idx

PARAMETERS = {
    "digits": 1_030,
    "digits_mlp": 1_850,
    "digits_residual": 2_366,
    "digits_deep": 1_774,
    "fashion": 3_778,
    "cifar_baseline": 6_418,
    "cifar_scale": 99_922,
    "cifar_impaired": 77,
    "cifar_minimal": 164,
    "cifar_multichannel": 6_418,
    "cifar_postpool": 24_346,
    "cifar_highres": 24_346,
    "cifar_deep_impaired": 1_140,
    "cifar16": 6_418,
    "fashion14": 6_274,
    "stories": 170_560,
    "tinystories": 2_767_872,
    "sources": 61_120,
    "sums": 61_120,
    "links": 61_120,
    "facts": 61_120,
    "mirrors": 61_120,
    "sorting": 61_120,
    "repeats": 61_120,
    "chain": 61_120,
}

CIFAR = [name for name in PARAMETERS if name.startswith("cifar_")]


def test_the_table_is_complete() -> None:
    assert set(PARAMETERS) <= set(TASKS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert get_task(name).host_parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("digits", ["r0c0", "r0c1", "r0c2"]),
        ("digits_residual", ["r0c0", "r0c1", "r0c2"]),
        ("digits_deep", [f"r0c{column}" for column in range(5)]),
        ("cifar_scale", [f"r0c{column}" for column in range(5)]),
        ("cifar_multichannel", ["r0c0", "r0c1", "r0c2", "r1c0", "r1c1", "r1c2"]),
        ("cifar_postpool", ["r1c0", "r1c1", "r1c2"]),
        ("cifar_highres", ["r0c0", "r0c1", "r0c2"]),
        ("cifar_deep_impaired", [f"r{row}c{column}" for row in (0, 1) for column in range(5)]),
        ("stories", ["r0c0", "r0c1", "r0c2"]),
    ],
)
def test_slots(name: str, slots: list[str]) -> None:
    assert list(get_task(name).slot_paths) == slots


def test_epochs_have_the_decided_sizes() -> None:
    sizes = {name: get_task(name).config.samples_per_step for name in PARAMETERS}
    assert sizes["digits"] == sizes["stories"] == 1024
    assert {sizes[name] for name in ("fashion", *CIFAR)} == {4096}
    assert get_task("digits").config.horizon == 60
    assert get_task("cifar_baseline").config.horizon == 150


@pytest.mark.parametrize(
    "name",
    ["digits", "digits_mlp", "digits_residual", "digits_deep"],
)
def test_contract_on_embedded_data(name: str) -> None:
    check_task(name)


@pytest.mark.parametrize("name", ["cifar_baseline", "cifar_minimal", "cifar_deep_impaired"])
def test_contract_on_small_cifar(tmp_path: Path, name: str) -> None:
    check_task(name, write_cifar_python(tmp_path / "cifar"))


def test_contract_on_small_fashion(tmp_path: Path) -> None:
    check_task("fashion", write_idx(tmp_path / "idx", count=60))


@pytest.mark.parametrize("name", ["cifar16", "fashion14"])
def test_contract_on_images_of_half_the_side(tmp_path: Path, name: str) -> None:
    write_cifar_python(tmp_path / "cifar-10-batches-py")
    write_idx(tmp_path / "fashion-mnist", count=60)
    check_task(name, tmp_path)


def test_own_files_are_taken(tmp_path: Path) -> None:
    y = np.arange(60) % 10
    np.savez(tmp_path / "grey.npz", x=np.zeros((60, 28, 28), np.uint8), y=y)
    np.savez(tmp_path / "colour.npz", x=np.zeros((60, 32, 32, 3), np.uint8), y=y)
    np.savez(tmp_path / "half.npz", x=np.zeros((60, 16, 16, 3), np.uint8), y=y)
    for name, file in (
        ("fashion", "grey.npz"),
        ("cifar_baseline", "colour.npz"),
        ("cifar16", "half.npz"),
    ):
        task = get_task(name)
        assert task.find(tmp_path / file) == str(tmp_path / file)
        assert task.load(tmp_path / file).size("test") == 10


@pytest.mark.parametrize("name", ["fashion", "cifar16", "fashion14", "stories"])
def test_contract_on_real_data(name: str, real: Callable[[Callable[[], object]], None]) -> None:
    real(get_task(name).find)
    check_task(name)


def test_shape_and_labels() -> None:
    source = read_digits()
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == np.uint8
    assert source.x.max() == GREY_LEVELS
    assert source.y is not None
    assert np.bincount(source.y).min() == 174
    assert source.x_test is None


def test_fixed_statistics_are_the_data_s() -> None:
    scaled = read_digits().x / GREY_LEVELS
    assert scaled.mean() == pytest.approx(MEAN, abs=1e-4)
    assert scaled.std() == pytest.approx(STD, abs=1e-4)


def test_they_are_scikit_learns_own() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    source = read_digits()
    assert np.array_equal(source.x.reshape(-1, 64), images)
    assert np.array_equal(source.y, labels)


def test_rows_of_digits_start_without_scikit_learn_and_without_the_compiler() -> None:
    """Each costs every process of a run a second."""
    script = (
        "import sys, esper.lab.population.population\n"
        "from esper.lab.tasks.presets import read_digits\n"
        "read_digits()\n"
        "print(sorted({'sklearn', 'scipy.stats', 'torch._dynamo'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_scikit_learn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        read_digits()
