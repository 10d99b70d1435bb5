"""Batches by the kernel against the plain way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from esper.bench.engine import measured_task, random_data
from esper.population.batches import BatchBuffers, EpochSampler
from tests.population.kernels.agreement import on_cuda

pytestmark = on_cuda


@pytest.mark.parametrize("augmentation", ["none", "crop_flip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_and_targets(augmentation: str, dtype: torch.dtype) -> None:
    task = measured_task("cifar_baseline", 16, 64)
    data = random_data(task, 400).to("cuda")
    data = dataclasses.replace(data, augmentation=augmentation)
    feed = EpochSampler(data, [3, 4, 5], 16)
    try:
        plan = feed.epoch([1, 2, 7])
        inputs = BatchBuffers(data, dtype)
        memory = set()
        for start in (0, 16, 48):
            inputs.load(plan, start, start + 16)
            x, y = plan.batch(data, start, start + 16)
            torch.testing.assert_close(inputs.x, x.to(dtype), rtol=1e-2, atol=1e-2)
            if dtype == torch.float32:
                torch.testing.assert_close(inputs.x, x, rtol=1e-6, atol=1e-6)
            assert torch.equal(inputs.y, y)
            memory.add(inputs.x.data_ptr())
        assert len(memory) == 1
    finally:
        feed.close()
