"""TaskData: batches, orders, subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.lab.tasks.data.source import Source
from esper.lab.tasks.dataset import TaskData, choose_data, make_data
from esper.lab.tasks.splits import make_splits
from esper.leyline.errors import ConfigError


def images(count: int = 200, **settings: Any) -> TaskData:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (count, 3, 6, 6), dtype=np.uint8)
    x[:, 2] = 7  # a channel without any variation
    source = Source("s", "here", x, np.arange(count) % 4, num_classes=4, scale=255.0)
    return make_data(source, **settings)


def images_of(x: np.ndarray, **settings: Any) -> TaskData:
    source = Source("s", "here", x, np.arange(len(x)) % 4, num_classes=4, scale=255.0)
    return make_data(source, **settings)


def features(count: int, samples_per_step: int) -> TaskData:
    x = np.arange(count, dtype=np.float32)[:, None]
    source = Source("s", "here", x, np.arange(count) % 2, num_classes=2)
    return make_data(source, samples_per_step=samples_per_step)


@given(st.integers(8, 60), st.integers(1, 200), st.integers(0, 2**62), st.integers(1, 40))
def test_every_sample_comes_before_any_comes_twice_whatever_epochs_are(
    count: int, steps: int, key: int, epochs: int
) -> None:
    data = features(count, steps)
    size = data.size("train")
    orders = [data.order(key, epoch) for epoch in range(1, epochs + 1)]
    assert all(order.shape == (steps,) for order in orders)
    for part in torch.cat(orders).split(size):
        assert len(part.unique()) == len(part)
        assert int(part.min()) >= 0
        assert int(part.max()) < size


def test_orders_differ_by_key_and_by_pass() -> None:
    data = features(100, 160)
    size = data.size("train")
    assert not torch.equal(data.order(0, 1), data.order(0, 2))
    assert not torch.equal(data.order(0, 1), data.order(1, 1))
    assert not torch.equal(data.order(0, 1)[:size], data.order(0, 1)[size : 2 * size])


def test_the_order_ignores_the_global_state_and_what_was_drawn_before() -> None:
    data = features(100, 64)
    torch.manual_seed(0)
    first = data.order(3, 4)
    torch.manual_seed(1)
    data.order(3, 3)
    assert torch.equal(data.order(3, 4), first)


def test_a_longer_epoch_begins_like_a_shorter_one() -> None:
    assert torch.equal(features(100, 30).order(5, 1), features(100, 150).order(5, 1)[:30])


def test_bytes_are_standardised_by_the_training_split() -> None:
    data = images()
    x, y = data.batch("train", torch.arange(data.size("train")))
    assert x.dtype == torch.float32
    assert x.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.0] * 3, abs=1e-4)
    assert x[:, :2].std(dim=(0, 2, 3)).tolist() == pytest.approx([1.0] * 2, abs=1e-3)
    assert bool(x.isfinite().all())
    assert y.dtype == torch.int64


def test_given_statistics_are_used() -> None:
    x = np.full((40, 1, 2, 2), 51, dtype=np.uint8)
    source = Source(
        "s", "h", x, np.arange(40) % 2, num_classes=2, scale=255.0, mean=(0.1,), std=(0.5,)
    )
    batch, _ = make_data(source).batch("val", torch.tensor([0, 1]))
    assert torch.allclose(batch, torch.full((2, 1, 2, 2), 0.2))


def test_real_numbers_are_taken_as_they_are() -> None:
    data = features(50, 10)
    x, _ = data.batch("train", torch.tensor([0]))
    assert x.item() == data.splits.samples["train"][0].item()


def test_images_are_stored_as_bytes() -> None:
    assert images().splits.samples["train"].dtype == torch.uint8


def test_a_batch_may_have_rows() -> None:
    data = images()
    indices = torch.arange(12).reshape(3, 4)
    x, y = data.batch("train", indices)
    assert x.shape == (3, 4, 3, 6, 6)
    assert torch.equal(x.flatten(0, 1), data.batch("train", indices.flatten())[0])
    assert y.shape == (3, 4)


def test_tokens_are_shifted_by_one() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (400, 9), dtype=np.uint8)
    data = make_data(Source("t", "here", tokens, None, num_classes=256))
    x, y = data.batch("val", torch.tensor([0, 5]))
    assert x.shape == y.shape == (2, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert data.objective == "language"


def test_images_are_varied_by_crops_alone() -> None:
    data = images(augmentation="crop_flip", samples_per_step=20)
    indices = torch.arange(20)
    plain, _ = data.batch("train", indices)
    assert torch.equal(plain, data.batch("train", indices)[0])
    first, _ = data.batch("train", indices, data.crops(1, 1))
    again, _ = data.batch("train", indices, data.crops(1, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    for crops in (data.crops(1, 2), data.crops(2, 1)):
        assert not torch.equal(first, data.batch("train", indices, crops)[0])
    assert images().crops(1, 1) is None


def test_the_subset_is_fixed_and_within_the_validation_split() -> None:
    data = images(400, validation_samples=16)
    assert data.subset.tolist() == images(400, validation_samples=16).subset.tolist()
    assert len(data.subset.unique()) == 16
    assert int(data.subset.max()) < data.size("val")
    assert len(images(400).subset) == data.size("val")


def test_train_size_and_noise_touch_only_the_training_split() -> None:
    plain, varied = images(400), images(400, train_size=100, label_noise=0.3)
    assert varied.size("train") == len(varied.indices("train")) == 100
    for split in ("val", "test"):
        for one, other in zip(
            plain.batch(split, plain.indices(split)),
            varied.batch(split, varied.indices(split)),
            strict=True,
        ):
            assert torch.equal(one, other)
    clean = images(400, train_size=100)
    x, y = clean.batch("train", clean.indices("train"))
    same_x, noisy_y = varied.batch("train", varied.indices("train"))
    assert torch.equal(x, same_x)
    assert int((y != noisy_y).sum()) == 30


def test_variants_of_a_source_share_its_samples_and_their_normalisation() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (200, 3, 6, 6), dtype=np.uint8)
    splits = make_splits(Source("s", "here", x, np.arange(200) % 4, num_classes=4, scale=255.0))
    plain, small = choose_data(splits), choose_data(splits, train_size=20)
    noisy = choose_data(splits, label_noise=0.5)
    assert plain.splits is small.splits is noisy.splits
    assert plain.train_targets is small.train_targets is splits.targets["train"]
    assert noisy.train_targets is not splits.targets["train"]
    alone = images_of(x, train_size=20)
    for one, other in zip(
        small.batch("train", small.order(1, 1)),
        alone.batch("train", alone.order(1, 1)),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert set(small.order(1, 1).tolist()) <= set(small.kept.tolist())
    # Normalised by all training samples of the source, however few of them are used.
    inputs, _ = plain.batch("train", plain.indices("train"))
    assert torch.allclose(inputs.mean(), torch.zeros(()), atol=1e-5)


def test_an_epoch_is_the_training_split_unless_told_otherwise() -> None:
    data = images(200)
    assert data.samples_per_step == data.size("train")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"augmentation": "crop_flip"}, "is for images"),
        ({"label_noise": 0.1}, "needs two or more classes"),
        ({"train_size": 10_000}, "train_size is 10000"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    x = np.zeros((40, 3), np.float32)
    source = Source("s", "here", x, np.linspace(0, 1, 40, dtype=np.float32)[:, None])
    with pytest.raises(ConfigError, match=words):
        make_data(source, **settings)
