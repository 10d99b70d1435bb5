"""Batches in memory that stays where it is."""

from __future__ import annotations

import torch

from esper.population.feed import Feed
from esper.population.inputs import Inputs, order_images
from esper.tasks import get_task


def test_batches_of_one_size_use_the_same_memory() -> None:
    task = get_task("digits", samples_per_step=40)
    data = task.load()
    feed = Feed(data, [1, 2], 16)
    try:
        plan, inputs = feed.epoch([1, 1]), Inputs(data, torch.float64)
        memory = []
        for start, stop in ((0, 16), (16, 32), (32, 40), (0, 16)):
            inputs.load(plan, start, stop)
            x, y = plan.batch(data, start, stop)
            assert torch.equal(inputs.x, x.double())
            assert torch.equal(inputs.y, y)
            memory.append(inputs.x.data_ptr())
        assert memory[0] == memory[1] == memory[3] != memory[2]
    finally:
        feed.close()


def test_without_kernels_images_stay_in_their_order() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert order_images(images) is images
