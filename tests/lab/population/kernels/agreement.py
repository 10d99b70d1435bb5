"""Comparing kernels with plain PyTorch in double precision, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
"""Precisions of the kernels, and the relative error allowed."""

Function = Callable[..., Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).cuda()


def assert_agree(
    kernel: Function,
    plain: Function,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Check a kernel's value and gradients against a plain function of doubled inputs."""
    low = [each.to(dtype).requires_grad_() for each in inputs]
    high = [each.detach().double().requires_grad_() for each in low]
    found, expected = kernel(*low), plain(*high)
    weight = draw(*expected.shape, seed=9).to(dtype)
    values = [found.detach(), *torch.autograd.grad(found, low, weight)]
    wanted = [expected.detach(), *torch.autograd.grad(expected, high, weight.double())]
    for number, (one, other) in enumerate(zip(values, wanted, strict=True)):
        assert one.shape == other.shape
        assert one.dtype == dtype
        error = float((one.double() - other).norm() / other.norm().clamp(min=1e-12))
        assert error <= tolerance, f"result {number} is off by {error:.2g}"


def last(x: Tensor) -> Tensor:
    """[R, B, C, H, W] with channels last, as kernels take it."""
    return x.movedim(2, -1)
