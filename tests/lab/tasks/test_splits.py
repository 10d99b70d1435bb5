"""A source in three parts: fixed, disjoint, balanced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.lab.tasks.data.source import Source
from esper.lab.tasks.presets import read_digits
from esper.lab.tasks.splits import (
    SPLITS,
    TOKEN_BLOCK,
    Part,
    carve,
    corrupt_labels,
    make_splits,
    select_classes,
    split_source,
    subsample,
)
from esper.leyline.errors import ConfigError, DataError


def labelled(count: int, classes: int) -> Part:
    """Samples whose content is their number, so that they can be recognised."""
    return Part(np.arange(count)[:, None], np.arange(count) % classes)


def ids(part: Part) -> list[int]:
    return [int(value) for value in part.x[:, 0]]


@given(st.integers(20, 400), st.integers(2, 10), st.floats(0.05, 0.5))
def test_carving_is_disjoint_complete_and_repeatable(
    count: int, classes: int, fraction: float
) -> None:
    part = labelled(count, classes)
    rest, carved = carve(part, fraction, "x")
    assert sorted(ids(rest) + ids(carved)) == list(range(count))
    assert ids(rest) == sorted(ids(rest))
    assert ids(carve(part, fraction, "x")[1]) == ids(carved)
    assert carved.y is not None
    assert part.y is not None
    shares = np.bincount(carved.y, minlength=classes) / np.bincount(part.y)
    smallest = count // classes
    assert np.abs(shares - fraction).max() <= 1.0 / smallest


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_a_class_of_one_stays_on_the_training_side(fraction: float) -> None:
    labels = np.array([0] * 20 + [1] + [2, 2])
    rest, carved = carve(Part(np.arange(23)[:, None], labels), fraction, "x")
    assert rest.y is not None
    assert carved.y is not None
    assert (rest.y == 1).sum() == 1
    assert (carved.y == 1).sum() == 0
    assert (rest.y == 2).sum() == (carved.y == 2).sum() == 1, "of two, each side has one"


def test_other_keys_carve_other_samples() -> None:
    part = labelled(200, 4)
    assert ids(carve(part, 0.2, "x")[1]) != ids(carve(part, 0.2, "y")[1])


def test_the_global_seed_does_not_matter() -> None:
    part = labelled(200, 4)
    torch.manual_seed(1)
    first = ids(carve(part, 0.2, "x")[1])
    torch.manual_seed(2)
    np.random.seed(2)
    assert ids(carve(part, 0.2, "x")[1]) == first


def test_digits_are_split_three_ways() -> None:
    source = read_digits()
    # Identical images exist in the data, so samples are told apart by a number in their place.
    numbered = Source(
        "d", "d", np.arange(1797, dtype=np.float32)[:, None], source.y, num_classes=10
    )
    parts = split_source(numbered, 0.25, 0.2)
    everything = sorted(number for split in SPLITS for number in ids(parts[split]))
    assert everything == list(range(1797))
    for split in SPLITS:
        y = parts[split].y
        assert y is not None
        share = np.bincount(y, minlength=10) / len(y)
        assert share.min() > 0.085
        assert share.max() < 0.115


def test_an_official_test_split_is_kept() -> None:
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 4
    x_test, y_test = np.ones((8, 3), np.float32), np.arange(8) % 4
    parts = split_source(Source("s", "s", x, y, x_test, y_test, num_classes=4), 0.2, 0.2)
    assert parts["test"].x is x_test
    assert len(parts["train"].x) == 32
    own = Source("s", "s", x, y, x_test, y_test, num_classes=4, x_val=x_test, y_val=y_test)
    parts = split_source(own, 0.2, 0.2)
    assert parts["val"].x is x_test
    assert parts["train"].x is x
    assert len(parts["val"].x) == 8


def test_text_is_carved_in_blocks() -> None:
    part = Part(np.arange(20 * TOKEN_BLOCK)[:, None], None)
    _, carved = carve(part, 0.1, "x")
    blocks = np.unique(carved.x[:, 0] // TOKEN_BLOCK, return_counts=True)
    assert len(blocks[0]) == 2
    assert blocks[1].tolist() == [TOKEN_BLOCK] * 2


def test_real_targets_are_carved_at_random() -> None:
    part = Part(np.arange(50)[:, None], np.linspace(0, 1, 50)[:, None])
    rest, carved = carve(part, 0.2, "x")
    assert sorted(ids(rest) + ids(carved)) == list(range(50))
    assert len(ids(carved)) == 10


@pytest.mark.parametrize("y", [np.zeros(1, int), None])
def test_too_few_samples(y: np.ndarray | None) -> None:
    source = Source("s", "/place", np.zeros((1, 3), np.uint8), y, num_classes=1)
    with pytest.raises(DataError, match=r"/place: 1 samples are too few"):
        split_source(source, 0.1, 0.1)


@given(st.integers(1, 97))
def test_subsamples_are_balanced_and_nested(size: int) -> None:
    part = labelled(97, 3)
    chosen = subsample(part, size, "k")
    assert len(chosen) == size
    assert chosen.tolist() == sorted(chosen.tolist())
    assert part.y is not None
    counts = np.bincount(part.y[chosen], minlength=3)
    assert counts.max() - counts.min() <= 2
    if size > 1:
        assert set(subsample(part, size - 1, "k").tolist()) < set(chosen.tolist())


def test_a_subsample_larger_than_the_data() -> None:
    with pytest.raises(DataError, match="train_size is 11, but the training split has only 10"):
        subsample(labelled(10, 2), 11, "k")


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_label_noise_changes_exactly_its_share(rate: float) -> None:
    labels = np.arange(200) % 5
    noisy = corrupt_labels(labels, rate, 5, "n")
    assert int((noisy != labels).sum()) == round(rate * 200)
    assert set(noisy) <= set(range(5))
    assert labels.tolist() == (np.arange(200) % 5).tolist()
    more = corrupt_labels(labels, min(1.0, rate + 0.2), 5, "n")
    changed = noisy != labels
    assert np.array_equal(noisy[changed], more[changed])


def test_real_cifar_splits(real: Callable[[Callable[[], object]], None]) -> None:
    from esper.lab.tasks.data.cifar import CIFAR, read_cifar

    real(CIFAR.find)
    parts = split_source(read_cifar(CIFAR.find()), 0.1, 0.1)
    counts = [np.bincount(part.y).tolist() for part in parts.values() if part.y is not None]
    assert counts == [[4500] * 10, [500] * 10, [1000] * 10]


def test_what_is_there_already_is_not_copied() -> None:
    source = Source("s", "s", np.zeros((40, 3), np.uint8), np.arange(40) % 4, num_classes=4)
    splits = make_splits(source)
    assert splits.to("cpu") is splits
    moved = splits.to("meta")
    tensors = [*moved.samples.values(), *moved.targets.values(), moved.gain, moved.bias]
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert moved.device.type == "meta"


def test_chosen_classes_are_numbered_anew_in_their_order() -> None:
    source = read_digits()
    assert source.y is not None
    few = select_classes(source, (7, 2))
    assert few.y is not None
    assert few.num_classes == 2
    assert np.array_equal(few.x[few.y == 0], source.x[source.y == 7])
    assert np.array_equal(few.x[few.y == 1], source.x[source.y == 2])
    assert len(few.x) == int(np.isin(source.y, (7, 2)).sum())


def test_the_official_test_split_has_the_same_classes() -> None:
    y = np.arange(40) % 4
    x = y[:, None].astype(np.float32)
    few = select_classes(Source("s", "here", x, y, x[:8], y[:8], num_classes=4), (3, 1))
    assert few.x_test is not None
    assert few.y_test is not None
    assert few.x_test[:, 0].tolist() == [1, 3, 1, 3]
    assert few.y_test.tolist() == [1, 0, 1, 0]


def test_classes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="classes has 10, but digits has only 0 to 9"):
        select_classes(read_digits(), (0, 10))
    real = Source("r", "here", np.zeros((9, 2), np.float32), np.zeros((9, 1), np.float32))
    with pytest.raises(ConfigError, match="labelled data alone"):
        select_classes(real, (0, 1))


def test_a_source_is_known_by_its_samples_and_targets() -> None:
    def fingerprint(x: np.ndarray, y: np.ndarray) -> str:
        return make_splits(Source("s", "s", x, y, num_classes=4)).fingerprint()

    x, y = np.arange(120, dtype=np.uint8).reshape(40, 3), np.arange(40) % 4
    first = fingerprint(x, y)
    assert fingerprint(x.copy(), y.copy()) == first
    assert fingerprint(x + np.uint8(1), y) != first
    assert fingerprint(x, (y + 1) % 4) != first
