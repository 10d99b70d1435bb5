"""What rows train on: named by row and epoch, never by neighbours or history."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from esper.kasmina.budget import Portion
from esper.lab.population.batches import (
    BatchBuffers,
    RowSamples,
    SamplePlan,
    join_shared,
    order_images,
    stack_normalisation,
)
from esper.lab.tasks import DataCache, get_task
from esper.lab.tasks.dataset import TaskData, choose_data
from esper.lab.tasks.request import TrainingBatches
from esper.lab.tasks.task import Task
from tests.lab.population.tiny_tasks import MIXED, TinyImages, TinyText

KEYS = [11, 5, 23]


@pytest.fixture(params=MIXED, ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> Task:
    made: Task = request.param()
    return made


def draw(
    data: TaskData | Sequence[TaskData], epochs: Sequence[int], keys: Sequence[int] = KEYS
) -> tuple[RowSamples, SamplePlan]:
    """Return rows with this data, one for all or one for each, and an epoch of them."""
    each = [data] * len(keys) if isinstance(data, TaskData) else list(data)
    samples = RowSamples(each, keys)
    return samples, draw_epochs(samples, epochs)


def draw_epochs(samples: RowSamples, epochs: Sequence[int]) -> SamplePlan:
    """Return whole epochs of rows."""
    count = samples._data[0].samples_per_step
    return samples.draw([Portion(e, (e - 1) * count, count) for e in epochs], 0, count)


def batches(
    samples: RowSamples, plan: SamplePlan, row: int, size: int = 4
) -> list[tuple[Tensor, Tensor]]:
    total = plan.indices.shape[1]
    parts = [(start, min(start + size, total)) for start in range(0, total, size)]
    found = [samples.gather(plan, start, stop) for start, stop in parts]
    return [(x[row], y[row]) for x, y in found]


def alone(data: TaskData, key: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Return what a network that grows alone sees."""
    found = TrainingBatches(data, 4, key)
    found.set_epoch(epoch)
    return list(found)


def assert_batches(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    for (x, y), (other_x, other_y) in zip(one, other, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_row_sees_what_a_network_alone_sees(task: Task, epoch: int) -> None:
    data = task.load()
    samples, plan = draw(data, [epoch] * 3)
    for row, key in enumerate(KEYS):
        assert_batches(batches(samples, plan, row), alone(data, key, epoch))


def test_a_row_does_not_depend_on_the_others(task: Task) -> None:
    data = task.load()
    samples, crowd = draw(data, [7, 2, 1])
    single = batches(*draw(data, [2], KEYS[1:2]), 0)
    assert_batches(batches(samples, crowd, 1), single)
    other = batches(samples, draw_epochs(samples, [2, 2, 2]), 0)
    assert not all(torch.equal(x, y) for (x, _), (y, _) in zip(other, single, strict=True)), (
        "rows with different keys see different samples"
    )


def test_rows_of_one_source_have_their_own_part_of_it_and_their_own_labels() -> None:
    shelf = DataCache()
    data = [
        shelf.load(TinyImages(TinyImages.defaults.replace(**changes)))
        for changes in ({}, {"train_size": 15}, {"label_noise": 0.5}, {"augment": "none"})
    ]
    samples, plan = draw(data, [1, 2, 1, 1], keys := [*KEYS, 7])
    assert samples.stored is data[0].splits.samples["train"], "pixels are not copied"
    for row, (each, key) in enumerate(zip(data, keys, strict=True)):
        assert_batches(batches(samples, plan, row), alone(each, key, (1, 2, 1, 1)[row]))
    assert len(plan.indices[1].unique()) <= 15


def test_rows_of_text_have_their_own_wrong_tokens() -> None:
    shelf = DataCache()
    plain, noisy, few, other = (
        shelf.load(TinyText(TinyText.defaults.replace(**changes)))
        for changes in (
            {},
            {"label_noise": 0.5},
            {"label_noise": 0.2, "train_size": 20},
            {"label_noise": 0.3, "val_fraction": 0.2},
        )
    )
    # Another source, of another alphabet.
    shifted = {split: x + 1 for split, x in other.splits.samples.items()}
    other = choose_data(
        dataclasses.replace(other.splits, samples=shifted), samples_per_step=18, label_noise=0.3
    )
    data = [noisy, plain, few, other]
    keys = [*KEYS, 7]
    samples, plan = draw(data, [2, 1, 1, 3], keys)
    for row, (each, key) in enumerate(zip(data, keys, strict=True)):
        expected = alone(each, key, (2, 1, 1, 3)[row])
        assert_batches(batches(samples, plan, row), expected)
        x, y = (torch.cat(parts) for parts in zip(*expected, strict=True))
        assert torch.equal(x[:, 1:], y[:, :-1]) == (each is plain)
    some = plan.of(torch.tensor([3, 0]))
    assert_batches(batches(samples, some, 0), batches(samples, plan, 3))
    assert_batches(batches(samples, some, 1), batches(samples, plan, 0))
    assert RowSamples([plain] * 2, [1, 2])._wrong_tokens is None


def test_rows_of_several_sources_lie_in_one_tensor() -> None:
    dark, plain = TinyImages().load(), TinyImages().load()
    half = {split: x // 2 for split, x in dark.splits.samples.items()}
    splits = dataclasses.replace(dark.splits, samples=half, gain=None, bias=None)
    data = [plain, dark.on(splits), plain]
    samples, plan = draw(data, [1, 1, 2])
    assert len(samples.stored) == 2 * len(plain.splits.samples["train"])
    for row, each in enumerate(data):
        assert_batches(batches(samples, plan, row), alone(each, KEYS[row], (1, 1, 2)[row]))


def test_normalisation_is_a_value_of_the_row() -> None:
    image = TinyImages().load().splits
    other = dataclasses.replace(image, gain=None, bias=None)
    assert stack_normalisation([other, other]) == (None, None)
    gain, bias = stack_normalisation([image, other])
    assert gain is not None
    assert bias is not None
    assert gain.shape == bias.shape == (2, 1, 1, 1)
    assert torch.equal(gain[0], image.gain)
    assert (float(gain[1]), float(bias[1])) == (1.0, 0.0)
    by_channel = RowSamples([TinyImages().load()] * 2, [1, 2]).channel_normalisation
    assert by_channel is not None
    assert by_channel[0].shape == (2, 1)
    assert RowSamples([TinyText().load()], [1]).channel_normalisation is None


def test_an_epoch_is_the_same_whatever_was_drawn_before() -> None:
    straight, jumping = (RowSamples([TinyImages().load()] * 3, KEYS) for _ in range(2))
    expected = {epoch: draw_epochs(straight, [epoch] * 3) for epoch in range(1, 6)}
    # Ahead of itself, back, the same again, and rows at different epochs, as after a restore.
    for epoch in (4, 5, 1, 1, 3, 2):
        found = draw_epochs(jumping, [epoch] * 3)
        assert torch.equal(found.indices, expected[epoch].indices)
        assert found.crops is not None
        assert expected[epoch].crops is not None
        for name in ("top", "left", "is_flipped"):
            assert torch.equal(getattr(found.crops, name), getattr(expected[epoch].crops, name))
    mixed = draw_epochs(jumping, [3, 1, 5])
    for row, epoch in enumerate((3, 1, 5)):
        assert torch.equal(mixed.indices[row], expected[epoch].indices[row])


def test_what_rows_share_lies_there_once() -> None:
    one, other = torch.arange(3), torch.arange(5)
    joined, first = join_shared([one, other, one], torch.device("cpu"))
    assert joined.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first.tolist() == [0, 3, 0]


def test_the_crops_of_a_row_are_those_of_a_network_alone() -> None:
    data = TinyImages().load()
    _, plan = draw(data, [3, 1, 2])
    assert plan.crops is not None
    for row, (key, epoch) in enumerate(zip(KEYS, (3, 1, 2), strict=True)):
        alone = data.crops(key, epoch)
        assert alone is not None
        assert torch.equal(plan.crops.top[row], alone.top)
        assert torch.equal(plan.crops.is_flipped[row], alone.is_flipped)
    indices = data.order(11, 1)
    plain, _ = data.batch("train", indices)
    assert plain.shape == (14, 1, 6, 6)
    assert not torch.equal(data.batch("train", indices, data.crops(11, 1))[0], plain)


def test_a_row_that_is_not_varied_beside_one_that_is_sees_images_as_they_are() -> None:
    plain = TinyImages(TinyImages.defaults.replace(augment="none")).load()
    samples, plan = draw([TinyImages().load(), plain, plain], [1, 1, 1])
    expected, _ = plain.batch("train", plain.order(KEYS[1], 1))
    assert torch.equal(torch.cat([x for x, _ in batches(samples, plan, 1)]), expected)


def test_rows_with_more_or_fewer_samples_are_drawn_apart() -> None:
    some = TinyImages(TinyImages.defaults.replace(train_size=15)).load()
    data = [TinyImages().load(), some, TinyImages().load()]
    samples, plan = draw(data, [2, 3, 2])
    for row, each in enumerate(data):
        assert_batches(batches(samples, plan, row), alone(each, KEYS[row], (2, 3, 2)[row]))


def test_batches_of_one_size_use_the_same_memory() -> None:
    samples, plan = draw(get_task("digits", samples_per_step=40).load(), [1, 1], [1, 2])
    inputs = BatchBuffers(torch.float64, samples.device)
    memory = []
    for start, stop in ((0, 16), (16, 32), (32, 40), (0, 16)):
        inputs.load(samples, plan, start, stop)
        x, y = samples.gather(plan, start, stop)
        assert torch.equal(inputs.x, x.double())
        assert torch.equal(inputs.y, y)
        memory.append(inputs.x.data_ptr())
    assert memory[0] == memory[1] == memory[3] != memory[2]


def test_without_kernels_images_stay_in_their_order() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert order_images(images) is images
