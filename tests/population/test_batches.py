"""What rows train on: named by row and epoch, never by neighbours or history."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from esper.growth.build import TrainingBatches
from esper.population.batches import (
    BatchBuffers,
    EpochPlan,
    EpochSampler,
    draw_epoch_crops,
    gather_batch,
    order_images,
)
from esper.tasks import get_task
from esper.tasks.dataset import TaskData
from esper.tasks.task import Task
from tests.population.tiny_tasks import MIXED, TinyImages

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


def batches(plan: EpochPlan, data: TaskData, size: int, row: int) -> list[tuple[Tensor, Tensor]]:
    total = data.samples_per_step
    parts = [(start, min(start + size, total)) for start in range(0, total, size)]
    found = [plan.batch(data, start, stop) for start, stop in parts]
    return [(x[row], y[row]) for x, y in found]


def assert_batches(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    for (x, y), (other_x, other_y) in zip(one, other, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_a_row_sees_what_a_network_alone_sees(task: Task, samplers: list[EpochSampler]) -> None:
    data, size = task.load(), task.config.batch_size
    sampler = EpochSampler(data, KEYS, size)
    samplers.append(sampler)
    for epoch in (1, 2, 3):
        plan = sampler.epoch([epoch] * len(KEYS))
        for row, key in enumerate(KEYS):
            alone = TrainingBatches(data, size, key)
            alone.set_epoch(epoch)
            assert_batches(batches(plan, data, size, row), list(alone))


def test_a_row_does_not_depend_on_the_others(task: Task, samplers: list[EpochSampler]) -> None:
    data, size = task.load(), task.config.batch_size
    together, alone = EpochSampler(data, KEYS, size), EpochSampler(data, KEYS[1:2], size)
    samplers += [together, alone]
    crowd = together.epoch([7, 2, 1])
    single = alone.epoch([2])
    assert_batches(batches(crowd, data, size, 1), batches(single, data, size, 0))
    other = batches(together.epoch([2, 2, 2]), data, size, 0)
    assert not all(
        torch.equal(x, y)
        for (x, _), (y, _) in zip(other, batches(single, data, size, 0), strict=True)
    ), "rows with different keys see different samples"


def test_an_epoch_is_the_same_whatever_was_drawn_before(samplers: list[EpochSampler]) -> None:
    data = TinyImages().load()
    straight, jumping = EpochSampler(data, KEYS, 4), EpochSampler(data, KEYS, 4)
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


def test_the_next_epoch_is_drawn_ahead(
    samplers: list[EpochSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = EpochSampler(TinyImages().load(), KEYS, 4)
    samplers.append(sampler)
    drawn: list[tuple[int, ...]] = []
    draw = sampler._draw

    def watch(numbers: tuple[int, ...]) -> EpochPlan:
        drawn.append(numbers)
        return draw(numbers)

    monkeypatch.setattr(sampler, "_draw", watch)
    sampler.epoch([1, 1, 1])
    assert sampler._ahead is not None
    ahead = sampler._ahead[1].result(timeout=60)
    assert drawn == [(1, 1, 1), (2, 2, 2)]
    assert sampler.epoch([2, 2, 2]) is ahead
    assert drawn.count((2, 2, 2)) == 1


def test_every_sample_comes_once_before_any_comes_twice() -> None:
    data = TinyImages().load()
    assert data.size("train") > data.samples_per_step
    order = data.order(11, 0, 1)
    assert len(order.unique()) == len(order) == data.samples_per_step


def test_crops_cover_an_epoch_whose_last_batch_is_short() -> None:
    data = TinyImages().load()
    crops = draw_epoch_crops(data, 11, 1, 4)
    assert crops.top.shape == crops.left.shape == crops.is_flipped.shape == (14,)
    indices = data.order(11, 0, 1)[None]
    plain, _ = gather_batch(data, indices, None)
    assert plain.shape == (1, 14, 1, 6, 6)
    assert plain.dtype == torch.float32


def test_a_closed_feed_leaves_no_thread() -> None:
    import threading

    sampler = EpochSampler(TinyImages().load(), KEYS, 4)
    sampler.epoch([1, 1, 1])
    sampler.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sampler")]


def test_batches_of_one_size_use_the_same_memory() -> None:
    task = get_task("digits", samples_per_step=40)
    data = task.load()
    sampler = EpochSampler(data, [1, 2], 16)
    try:
        plan, inputs = sampler.epoch([1, 1]), BatchBuffers(data, torch.float64)
        memory = []
        for start, stop in ((0, 16), (16, 32), (32, 40), (0, 16)):
            inputs.load(plan, start, stop)
            x, y = plan.batch(data, start, stop)
            assert torch.equal(inputs.x, x.double())
            assert torch.equal(inputs.y, y)
            memory.append(inputs.x.data_ptr())
        assert memory[0] == memory[1] == memory[3] != memory[2]
    finally:
        sampler.close()


def test_without_kernels_images_stay_in_their_order() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert order_images(images) is images
