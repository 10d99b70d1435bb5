"""Max pools against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lab.population.kernels.agreement import PRECISIONS, assert_agree, draw, last, on_cuda

pytestmark = on_cuda


def pool_rows(x: Tensor) -> Tensor:
    return last(F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, x.shape[:2]))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("image", [6, 7])
def test_values_and_gradients(image: int, dtype: torch.dtype, tolerance: float) -> None:
    from esper.lab.population.kernels.images import pool_max

    # Zeros of a ReLU are equal to one another: the first of them gets the gradient.
    x = torch.relu(draw(2, 3, 4, image, image))
    assert_agree(lambda x: pool_max(last(x)), pool_rows, [x], dtype, 1e-6)


def test_nan_is_the_largest() -> None:
    from esper.lab.population.kernels.images import pool_max

    x = draw(1, 2, 4, 4, 3)
    x[0, 0, 1, 0, 1] = torch.nan
    assert torch.equal(torch.isnan(pool_max(x)), torch.isnan(pool_rows(x.movedim(-1, 2))))
