"""What rows train on: named by row and epoch, never by neighbours or history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from esper.growth.build import TrainingBatches
from esper.population.batches import (
    BatchBuffers,
    EpochPlan,
    EpochSampler,
    RowSamples,
    draw_epoch_crops,
    gather_batch,
    order_images,
    stack_normalisation,
)
from esper.tasks import DataShelf, get_task
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task
from tests.population.tiny_tasks import MIXED, TinyImages, TinyText

KEYS = [11, 5, 23]


@pytest.fixture(params=MIXED, ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> Task:
    made: Task = request.param()
    return made


@pytest.fixture
def samplers() -> Iterator[list[EpochSampler]]:
    made: list[EpochSampler] = []
    yield made
    for sampler in made:
        sampler.close()


def draw(
    data: TaskData | Sequence[TaskData], epochs: Sequence[int], keys: Sequence[int] = KEYS
) -> tuple[RowSamples, EpochPlan]:
    """Return rows with this data, one for all or one for each, and an epoch of them."""
    each = [data] * len(keys) if isinstance(data, TaskData) else list(data)
    samples = RowSamples(each, keys, 4)
    return samples, samples.draw(epochs)


def batches(
    samples: RowSamples, plan: EpochPlan, row: int, size: int = 4
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
    other = batches(samples, samples.draw([2, 2, 2]), 0)
    assert not all(torch.equal(x, y) for (x, _), (y, _) in zip(other, single, strict=True)), (
        "rows with different keys see different samples"
    )


def test_rows_of_one_source_have_their_own_part_of_it_and_their_own_labels() -> None:
    shelf = DataShelf()
    data = [
        shelf.load(TinyImages(TinyImages.defaults.replace(**changes)))
        for changes in ({}, {"train_size": 15}, {"label_noise": 0.5}, {"augment": "none"})
    ]
    samples, plan = draw(data, [1, 2, 1, 1], keys := [*KEYS, 7])
    assert samples.stored is data[0].splits.samples["train"], "pixels are not copied"
    for row, (each, key) in enumerate(zip(data, keys, strict=True)):
        assert_batches(batches(samples, plan, row), alone(each, key, (1, 2, 1, 1)[row]))
    assert len(plan.indices[1].unique()) <= 15


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
    by_channel = RowSamples([TinyImages().load()] * 2, [1, 2], 4).channel_normalisation
    assert by_channel is not None
    assert by_channel[0].shape == (2, 1)
    assert RowSamples([TinyText().load()], [1], 4).channel_normalisation is None


def test_an_epoch_is_the_same_whatever_was_drawn_before(samplers: list[EpochSampler]) -> None:
    samples = RowSamples([TinyImages().load()] * 3, KEYS, 4)
    straight, jumping = (EpochSampler(samples, [60] * 3) for _ in range(2))
    samplers += [straight, jumping]
    expected = {epoch: straight.epoch([epoch] * 3) for epoch in range(1, 6)}
    # Ahead of itself, back, the same again, and rows at different epochs, as after a restore.
    for epoch in (4, 5, 1, 1, 3, 2):
        found = jumping.epoch([epoch] * 3)
        assert torch.equal(found.indices, expected[epoch].indices)
        assert found.crops is not None
        assert expected[epoch].crops is not None
        for name in ("top", "left", "is_flipped"):
            assert torch.equal(getattr(found.crops, name), getattr(expected[epoch].crops, name))
    mixed = jumping.epoch([3, 1, 5])
    for row, epoch in enumerate((3, 1, 5)):
        assert torch.equal(mixed.indices[row], expected[epoch].indices[row])


@pytest.mark.parametrize(
    ("horizons", "asked", "drawn"),
    [
        ([9, 9, 9], [(1, 1, 1), (2, 2, 2)], [(1, 1, 1), (2, 2, 2), (3, 3, 3)]),
        # A row at rest stays at its last epoch, and the others' next one is still drawn ahead.
        ([9, 1, 2], [(2, 2, 2), (3, 2, 3)], [(2, 1, 2), (3, 1, 2), (4, 1, 2)]),
    ],
)
def test_the_next_epoch_is_drawn_ahead(
    samplers: list[EpochSampler],
    monkeypatch: pytest.MonkeyPatch,
    horizons: list[int],
    asked: list[tuple[int, ...]],
    drawn: list[tuple[int, ...]],
) -> None:
    samples = RowSamples([TinyImages().load()] * 3, KEYS, 4)
    sampler = EpochSampler(samples, horizons)
    samplers.append(sampler)
    seen: list[tuple[int, ...]] = []
    draw_now = samples.draw

    def watch(numbers: tuple[int, ...]) -> EpochPlan:
        seen.append(numbers)
        return draw_now(numbers)

    monkeypatch.setattr(samples, "draw", watch)
    sampler.epoch(asked[0])
    assert sampler._ahead is not None
    ahead = sampler._ahead[1].result(timeout=60)
    assert sampler.epoch(asked[1]) is ahead
    assert sampler._ahead[1].result(timeout=60) is not ahead
    assert seen == drawn


def test_every_sample_comes_once_before_any_comes_twice() -> None:
    data = TinyImages().load()
    assert data.size("train") > data.samples_per_step
    order = data.order(11, 0, 1)
    assert len(order.unique()) == len(order) == data.samples_per_step


def test_crops_cover_an_epoch_whose_last_batch_is_short() -> None:
    data = TinyImages().load()
    crops = draw_epoch_crops(data, 11, 1, 4)
    assert crops.top.shape == crops.left.shape == crops.is_flipped.shape == (14,)
    indices = data.order(11, 0, 1)
    plain, _ = gather_batch(data, indices, None)
    assert plain.shape == (14, 1, 6, 6)
    assert plain.dtype == torch.float32
    varied, _ = gather_batch(data, indices, crops)
    assert not torch.equal(varied, plain)


def test_crops_of_a_row_that_is_not_varied_change_nothing() -> None:
    data = TinyImages(TinyImages.defaults.replace(augment="none")).load()
    indices = data.order(11, 0, 1)
    plain, _ = gather_batch(data, indices, None)
    assert torch.equal(gather_batch(data, indices, draw_epoch_crops(data, 11, 1, 4))[0], plain)


def test_a_closed_feed_leaves_no_thread() -> None:
    import threading

    sampler = EpochSampler(RowSamples([TinyImages().load()] * 3, KEYS, 4), [9] * 3)
    sampler.epoch([1, 1, 1])
    sampler.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sampler")]


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
