"""Convolutions of many rows against PyTorch's, one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lab.population.kernels.agreement import PRECISIONS, assert_agree, draw, last, on_cuda

pytestmark = on_cuda

SHAPES = [
    # rows, batch, inputs, side of the image, outputs, side of the kernel, padding
    (2, 3, 3, 6, 8, 3, 1),
    (3, 2, 8, 7, 4, 1, 0),
    (2, 5, 4, 8, 4, 3, 0),
    (2, 2, 20, 5, 40, 3, 1),
    (1, 2, 64, 4, 130, 3, 1),
    (2, 40, 16, 8, 32, 5, 2),
]


def convolve_rows(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    pairs = zip(x, weight, strict=True)
    return last(torch.stack([F.conv2d(a, w, padding=padding) for a, w in pairs]))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("rows", "batch", "c", "image", "o", "side", "padding"), SHAPES)
def test_values_and_gradients(
    rows: int,
    batch: int,
    c: int,
    image: int,
    o: int,
    side: int,
    padding: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    from esper.lab.population.kernels.convolution import convolve

    assert_agree(
        lambda x, w: convolve(last(x), w, padding),
        lambda x, w: convolve_rows(x, w, padding),
        [draw(rows, batch, c, image, image), draw(rows, o, c, side, side, seed=1)],
        dtype,
        tolerance,
    )


def test_rows_may_share_their_input_and_pixels_may_be_padded() -> None:
    from esper.lab.population.kernels.convolution import convolve

    weight = draw(3, 8, 3, 3, 3)
    pixels = draw(4, 6, 6, 4)
    pixels[..., 3] = 0
    shared = pixels[..., :3].expand(3, 4, 6, 6, 3)
    found = convolve(shared, weight, 1)
    expected = convolve_rows(shared.movedim(-1, 2).double(), weight.double(), 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_finite_reaches_no_other() -> None:
    from esper.lab.population.kernels.convolution import convolve

    x, weight = draw(3, 4, 6, 6, 8).requires_grad_(), draw(3, 8, 8, 3, 3, seed=1).requires_grad_()

    def run() -> list[Tensor]:
        out = convolve(x, weight, 1)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, weight])]

    clean = run()
    with torch.no_grad():
        x[1] = torch.nan
        weight[2] = torch.inf
    for before, after in zip(clean, run(), strict=True):
        assert torch.equal(before[0], after[0])
        assert not bool(torch.isfinite(after[1:]).any())
