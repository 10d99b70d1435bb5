"""GroupNorm of many rows, with what follows it, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lab.population.kernels.agreement import PRECISIONS, assert_agree, draw, last, on_cuda

pytestmark = on_cuda


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("channels", "groups", "image"), [(8, 1, 6), (32, 2, 4), (3, 1, 5)])
def test_values_and_gradients(
    channels: int,
    groups: int,
    image: int,
    relu: bool,
    with_residual: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    from esper.lab.population.kernels.normalisation import normalise

    def plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = zip(x, weight, bias, strict=True)
        out = torch.stack([F.group_norm(a, groups, w, b) for a, w, b in rows])
        out = torch.relu(out) if relu else out
        return last(out if residual is None else out + residual)

    def kernel(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        other = None if residual is None else last(residual)
        return normalise(last(x), weight, bias, groups, 1e-5, relu=relu, residual=other)

    inputs = [
        draw(3, 4, channels, image, image) * 2 + 1,
        draw(3, channels, seed=1),
        draw(3, channels, seed=2),
    ]
    if with_residual:
        inputs.append(draw(3, 4, channels, image, image, seed=3))
    assert_agree(kernel, plain, inputs, dtype, tolerance)


def test_what_is_not_finite_stays_so_behind_relu() -> None:
    from esper.lab.population.kernels.normalisation import normalise

    x = draw(2, 3, 4, 4, 8)
    x[0, 1, 0, 0, 0] = torch.nan
    out = normalise(x, draw(2, 8), draw(2, 8), 1, 1e-5, relu=True)
    assert bool(torch.isnan(out[0, 1]).all())
    assert bool(torch.isfinite(out[1]).all())
    assert bool(torch.isfinite(out[0, [0, 2]]).all())
