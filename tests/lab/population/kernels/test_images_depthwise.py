"""Depthwise convolutions of many rows against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.lab.population.kernels.agreement import PRECISIONS, assert_agree, draw, last, on_cuda

pytestmark = on_cuda


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("channels", "image", "side"), [(5, 7, 3), (8, 8, 3), (32, 4, 5)])
def test_values_and_gradients(
    channels: int, image: int, side: int, dtype: torch.dtype, tolerance: float
) -> None:
    from esper.lab.population.kernels.images import filter_depthwise

    assert_agree(
        lambda x, w: filter_depthwise(last(x), w),
        lambda x, w: last(
            torch.stack(
                [
                    F.conv2d(a, b, padding=side // 2, groups=channels)
                    for a, b in zip(x, w, strict=True)
                ]
            )
        ),
        [draw(3, 6, channels, image, image), draw(3, channels, 1, side, side, seed=1)],
        dtype,
        tolerance,
    )
