"""Sums of partial results."""

from __future__ import annotations

import pytest
import torch

from tests.lab.population.kernels.agreement import draw, on_cuda

pytestmark = on_cuda


@pytest.mark.parametrize("splits", [1, 5, 40])
def test_splits_are_summed(splits: int) -> None:
    from esper.lab.population.kernels.convolution import fold

    parts = draw(3, splits, 7, 50)
    torch.testing.assert_close(fold(parts, torch.float32), parts.sum(1), rtol=1e-5, atol=1e-5)
    assert fold(parts, torch.bfloat16).dtype == torch.bfloat16


def test_parameters_whose_rows_are_contiguous_are_not_copied() -> None:
    from esper.lab.population.kernels.convolution import each_in_order

    flat = draw(4, 30)
    leaf = flat[:, 6:18].view(4, 3, 4)
    assert each_in_order(leaf) is leaf
    assert each_in_order(leaf.mT).is_contiguous()
