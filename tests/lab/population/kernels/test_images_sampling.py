"""Batches by the kernel against the plain way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from esper.kasmina.budget import Portion
from esper.lab.bench.engine import measured_task, random_data
from esper.lab.population.batches import BatchBuffers, RowSamples
from tests.lab.population.kernels.agreement import on_cuda

pytestmark = on_cuda


@pytest.mark.parametrize("augmentations", ["none", "crop_flip", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_and_targets(augmentations: str, dtype: torch.dtype) -> None:
    task = measured_task("cifar_baseline", 16, 64)
    whole = random_data(task, 400).to("cuda")
    # Rows differ in source, normalisation, labels and in whether images are varied.
    dark = dataclasses.replace(
        whole.splits,
        samples={split: x // 3 for split, x in whole.splits.samples.items()},
        gain=None if whole.splits.gain is None else 2 * whole.splits.gain,
    )
    kinds = ["crop_flip", "none", "crop_flip"] if augmentations == "mixed" else [augmentations] * 3
    data = [
        dataclasses.replace(each, augmentation=kind)
        for each, kind in zip((whole, whole.on(dark), whole), kinds, strict=True)
    ]
    samples = RowSamples(data, [3, 4, 5])
    portions = [Portion(epoch, 64 * (epoch - 1), 64) for epoch in (1, 2, 7)]
    plan, memory = samples.draw(portions, 0, 64), set()
    inputs = BatchBuffers(dtype, samples.device)
    for start in (0, 16, 48):
        inputs.load(samples, plan, start, start + 16)
        x, y = samples.gather(plan, start, start + 16)
        torch.testing.assert_close(inputs.x, x.to(dtype), rtol=1e-2, atol=1e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(inputs.x, x, rtol=1e-6, atol=1e-6)
        assert torch.equal(inputs.y, y)
        memory.add(inputs.x.data_ptr())
    assert len(memory) == 1
