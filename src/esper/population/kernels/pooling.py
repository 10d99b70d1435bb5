"""2x2 max pools of whole images, and the way back without a list of places.

The way back compares the four values again: it reads the activation once more, where PyTorch keeps
and reads an index of eight bytes for every value and scatters.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _pool(x, out, count, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest of every 2x2 square; NaN is larger than anything."""
    HO: tl.constexpr = H // 2
    WO: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel, c = n // C, n % C
    image, place = pixel // (HO * WO), pixel % (HO * WO)
    here = x + ((image * H + place // WO * 2) * W + place % WO * 2) * C + c
    best = tl.load(here, mask=n < count, other=0.0)
    for step in tl.static_range(1, 4):
        other = tl.load(here + ((step // 2) * W + step % 2) * C, mask=n < count, other=0.0)
        best = tl.where((other > best) | (other != other), other, best)
    tl.store(out + n, best, mask=n < count)


@triton.jit
def _pool_back(
    x,
    grad,
    grad_x,
    count,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give every square's gradient to the first of its largest values."""
    HO: tl.constexpr = H // 2
    WO: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel, c = n // C, n % C
    image, place = pixel // (HO * WO), pixel % (HO * WO)
    here = ((image * H + place // WO * 2) * W + place % WO * 2) * C + c
    best = tl.load(x + here, mask=n < count, other=0.0)
    which = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in tl.static_range(1, 4):
        other = tl.load(x + here + ((step // 2) * W + step % 2) * C, mask=n < count, other=0.0)
        better = (other > best) | (other != other)
        best, which = tl.where(better, other, best), tl.where(better, step, which)
    g = tl.load(grad + n, mask=n < count, other=0.0)
    for step in tl.static_range(4):
        target = grad_x + here + ((step // 2) * W + step % 2) * C
        tl.store(target, tl.where(which == step, g, 0.0), mask=n < count)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width, channels = x.shape[-3:]
        out = x.new_empty((*x.shape[:-3], height // 2, width // 2, channels))
        count = out.numel()
        _pool[(triton.cdiv(count, _BLOCK),)](
            x, out, count, H=height, W=width, C=channels, BLOCK=_BLOCK
        )
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        height, width, channels = x.shape[-3:]
        # What no square covers, at an odd edge, gets nothing.
        odd = height % 2 or width % 2
        grad_x = torch.zeros_like(x) if odd else torch.empty_like(x)
        count = grad.numel()
        _pool_back[(triton.cdiv(count, _BLOCK),)](
            x, grad, grad_x, count, H=height, W=width, C=channels, BLOCK=_BLOCK
        )
        return grad_x


def pool_max(x: Tensor) -> Tensor:
    """Return the 2x2 max pool of x [..., H, W, C]."""
    out: Tensor = _MaxPool.apply(x.contiguous())  # type: ignore[no-untyped-call]
    return out
