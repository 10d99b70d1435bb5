"""TaskData: batches, orders, subsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.errors import ConfigError, DataError
from esper.tasks.data.source import Source
from esper.tasks.dataset import (
    PADDING,
    SPLITS,
    TOKEN_BLOCK,
    Crops,
    Part,
    TaskData,
    carve,
    corrupt_labels,
    crop_flip,
    draw_crops,
    make_data,
    select_classes,
    split_source,
    subsample,
)
from esper.tasks.presets import read_digits


def images(count: int = 200, **settings: Any) -> TaskData:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (count, 3, 6, 6), dtype=np.uint8)
    x[:, 2] = 7  # a channel without any variation
    source = Source("s", "here", x, np.arange(count) % 4, num_classes=4, scale=255.0)
    return make_data(source, **settings)


def features(count: int, samples_per_step: int) -> TaskData:
    x = np.arange(count, dtype=np.float32)[:, None]
    source = Source("s", "here", x, np.arange(count) % 2, num_classes=2)
    return make_data(source, samples_per_step=samples_per_step)


KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 10**6), st.text(max_size=8))


@given(st.integers(8, 60), st.integers(1, 200), KEYS)
def test_an_order_uses_every_sample_before_any_twice(
    count: int, steps: int, keys: tuple[int | str, ...]
) -> None:
    data = features(count, steps)
    order = data.order(*keys)
    size = data.size("train")
    assert order.shape == (steps,)
    for start in range(0, steps, size):
        part = order[start : start + size]
        assert len(part.unique()) == len(part)
        assert int(part.min()) >= 0
        assert int(part.max()) < size
    assert torch.equal(order, data.order(*keys))


def test_orders_differ_by_key_and_by_pass() -> None:
    data = features(100, 160)
    size = data.size("train")
    assert not torch.equal(data.order(0, 1), data.order(0, 2))
    assert not torch.equal(data.order(0, 1), data.order(1, 0))
    assert not torch.equal(data.order(0, 1)[:size], data.order(0, 1)[size:])


def test_the_order_ignores_the_global_state() -> None:
    data = features(100, 64)
    torch.manual_seed(0)
    first = data.order(3, 4)
    torch.manual_seed(1)
    assert torch.equal(data.order(3, 4), first)


def test_a_longer_epoch_begins_like_a_shorter_one() -> None:
    assert torch.equal(features(100, 30).order(5), features(100, 150).order(5)[:30])


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
    assert x.item() == data.samples["train"][0].item()


def test_images_are_stored_as_bytes() -> None:
    assert images().samples["train"].dtype == torch.uint8


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


def test_augmentation_needs_a_generator_and_varies_only_then() -> None:
    data = images(augmentation="crop_flip")
    indices = torch.arange(20)
    plain, _ = data.batch("train", indices)
    assert torch.equal(plain, data.batch("train", indices)[0])
    first, _ = data.batch("train", indices, torch.Generator().manual_seed(1))
    again, _ = data.batch("train", indices, torch.Generator().manual_seed(1))
    other, _ = data.batch("train", indices, torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, plain)
    without = images()
    assert torch.equal(without.batch("train", indices, torch.Generator().manual_seed(1))[0], plain)


def test_the_subset_is_fixed_and_within_the_validation_split() -> None:
    data = images(400, validation_samples=16)
    assert data.subset.tolist() == images(400, validation_samples=16).subset.tolist()
    assert len(data.subset.unique()) == 16
    assert int(data.subset.max()) < data.size("val")
    assert len(images(400).subset) == data.size("val")


def test_train_size_and_noise_touch_only_the_training_split() -> None:
    plain, varied = images(400), images(400, train_size=100, label_noise=0.3)
    assert varied.size("train") == 100
    for split in ("val", "test"):
        assert torch.equal(plain.samples[split], varied.samples[split])
        assert torch.equal(plain.targets[split], varied.targets[split])
    clean = images(400, train_size=100)
    assert torch.equal(clean.samples["train"], varied.samples["train"])
    assert int((clean.targets["train"] != varied.targets["train"]).sum()) == 30


def test_an_epoch_is_the_training_split_unless_told_otherwise() -> None:
    data = images(200)
    assert data.samples_per_step == data.size("train")


def test_to_moves_everything() -> None:
    moved = images().to("meta")
    tensors = [*moved.samples.values(), *moved.targets.values(), moved.gain, moved.subset]
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert moved.device.type == "meta"


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


def reference(image: Tensor, top: int, left: int, is_flipped: bool) -> Tensor:
    """The plain way: pad, mirror, cut. Mirroring the cut equals mirroring the image first."""
    height, width = image.shape[-2:]
    padded = F.pad(image, (PADDING, PADDING, PADDING, PADDING))
    cut = padded[:, top : top + height, left : left + width]
    return cut.flip(-1) if is_flipped else cut


@given(st.integers(0, 2**31), st.sampled_from([torch.uint8, torch.float32]))
def test_each_image_is_cut_as_drawn(seed: int, dtype: torch.dtype) -> None:
    images = (torch.rand(5, 3, 9, 7) * 255).to(dtype)
    crops = draw_crops(5, torch.Generator().manual_seed(seed))
    result = crop_flip(images, crops)
    assert result.dtype == dtype
    for index in range(5):
        expected = reference(
            images[index],
            int(crops.top[index]),
            int(crops.left[index]),
            bool(crops.is_flipped[index]),
        )
        assert torch.equal(result[index], expected)


def test_the_middle_crop_changes_nothing() -> None:
    images = torch.randn(2, 3, 8, 8)
    middle = torch.full((2,), PADDING)
    crops = Crops(middle, middle, torch.tensor([False, True]))
    result = crop_flip(images, crops)
    assert torch.equal(result[0], images[0])
    assert torch.equal(result[1], images[1].flip(-1))


def test_draws_cover_the_range_evenly() -> None:
    crops = draw_crops(20_000, torch.Generator().manual_seed(0))
    for offsets in (crops.top, crops.left):
        shares = offsets.bincount(minlength=9) / len(offsets)
        assert shares.shape == (9,)
        assert shares.tolist() == pytest.approx([1 / 9] * 9, abs=0.01)
    assert crops.is_flipped.float().mean().item() == pytest.approx(0.5, abs=0.01)
    together = torch.corrcoef(torch.stack([crops.top, crops.left]).float())[0, 1]
    assert abs(together.item()) < 0.03


def test_the_generator_decides() -> None:
    first = draw_crops(64, torch.Generator().manual_seed(3))
    same = draw_crops(64, torch.Generator().manual_seed(3))
    other = draw_crops(64, torch.Generator().manual_seed(4))
    assert torch.equal(first.top, same.top)
    assert torch.equal(first.is_flipped, same.is_flipped)
    assert not torch.equal(first.top, other.top)


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
    assert len(chosen.x) == size
    assert chosen.y is not None
    counts = np.bincount(chosen.y, minlength=3)
    assert counts.max() - counts.min() <= 2
    if size > 1:
        assert set(ids(subsample(part, size - 1, "k"))) < set(ids(chosen))


def test_a_subsample_larger_than_the_data() -> None:
    with pytest.raises(DataError, match="train_size is 11, but the training split has only 10"):
        subsample(labelled(10, 2), 11, "k")


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_label_noise_changes_exactly_its_share(rate: float) -> None:
    part = labelled(200, 5)
    noisy = corrupt_labels(part, rate, 5, "n")
    assert noisy.y is not None
    assert part.y is not None
    assert int((noisy.y != part.y).sum()) == round(rate * 200)
    assert set(noisy.y) <= set(range(5))
    assert part.y.tolist() == (np.arange(200) % 5).tolist()
    more = corrupt_labels(part, min(1.0, rate + 0.2), 5, "n")
    assert more.y is not None
    changed = noisy.y != part.y
    assert np.array_equal(noisy.y[changed], more.y[changed])


def test_real_cifar_splits(real: Callable[[Callable[[], object]], None]) -> None:
    from esper.tasks.data.cifar import find_cifar, read_cifar

    real(find_cifar)
    parts = split_source(read_cifar(find_cifar()), 0.1, 0.1)
    counts = [np.bincount(part.y).tolist() for part in parts.values() if part.y is not None]
    assert counts == [[4500] * 10, [500] * 10, [1000] * 10]


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
