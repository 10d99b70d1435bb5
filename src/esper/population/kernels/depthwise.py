"""Depthwise convolutions of many networks at once: every channel by a kernel of its own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.folding import each_in_order, fold

_BLOCK = 1024
_PROGRAMS_WANTED = 1056
_MOST_SPLITS = 64


@triton.jit
def _filter(
    x,
    w,
    out,
    w_row,
    count,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIDE: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Filter a block of one row's elements; images keep their size."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel, c = n // C, n % C
    y, column = pixel // W % H, pixel % W
    x += row * count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(SIDE * SIDE):
        yy, xx = y + (tap // SIDE - SIDE // 2), column + (tap % SIDE - SIDE // 2)
        there = (n < count) & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
        shift = (tap // SIDE - SIDE // 2) * W + tap % SIDE - SIDE // 2
        value = tl.load(x + n + shift * C, mask=there, other=0.0)
        which = SIDE * SIDE - 1 - tap if TURNED else tap
        weight = tl.load(w + row * w_row + c * (SIDE * SIDE) + which)
        total += value.to(tl.float32) * weight.to(tl.float32)
    tl.store(out + row * count + n, total.to(out.dtype.element_ty), mask=n < count)


@triton.jit
def _weigh(
    x,
    grad,
    out,
    pixels,
    share,
    splits,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum the gradient of one tap of every kernel of a row over one share of its pixels."""
    tap, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    down, right = tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, share, BLOCK_P):
        p = part * share + start + tl.arange(0, BLOCK_P)
        yy, xx = p // W % H + down, p % W + right
        here = (row * pixels + p)[:, None] * C + c[None, :]
        inside = (p < pixels)[:, None] & (c < C)[None, :]
        there = inside & ((yy >= 0) & (yy < H) & (xx >= 0) & (xx < W))[:, None]
        g = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + here + (down * W + right) * C, mask=there, other=0.0)
        # Outside of the image the product must be zero, whatever the gradient is.
        total += tl.where(there, value.to(tl.float32) * g, 0.0)
    out += (row * splits + part) * (SIDE * SIDE * C) + tap
    tl.store(out + c * (SIDE * SIDE), tl.sum(total, 0), mask=c < C)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = each_in_order(weight)
        ctx.save_for_backward(x, weight)
        return _apply(x, weight, turned=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _apply(grad, weight, turned=True) if ctx.needs_input_grad[0] else None
        return grad_x, _weight_gradient(x, grad, weight)


def filter_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [R, B, H, W, C] filtered by weight [R, C, 1, k, k], k odd, in the same size."""
    out: Tensor = _Depthwise.apply(x.contiguous(), weight)  # type: ignore[no-untyped-call]
    return out


def _apply(x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
    rows, _, height, width, channels = x.shape
    out, count = torch.empty_like(x), x[0].numel()
    _filter[(triton.cdiv(count, _BLOCK), rows)](
        x,
        weight,
        out,
        weight.stride(0),
        count,
        C=channels,
        H=height,
        W=width,
        SIDE=weight.shape[-1],
        TURNED=turned,
        BLOCK=_BLOCK,
    )
    return out


def _weight_gradient(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    rows, batch, height, width, channels = x.shape
    pixels, side = batch * height * width, weight.shape[-1]
    block_c = triton.next_power_of_2(channels)
    block_p = max(16, 4096 // block_c)
    splits = triton.cdiv(_PROGRAMS_WANTED, rows * side * side)
    splits = max(1, min(splits, _MOST_SPLITS, triton.cdiv(pixels, block_p)))
    share = triton.cdiv(triton.cdiv(pixels, splits), block_p) * block_p
    splits = triton.cdiv(pixels, share)
    partial = torch.empty((rows, splits, *weight.shape[1:]), dtype=torch.float32, device=x.device)
    _weigh[(side * side, splits, rows)](
        x,
        grad,
        partial,
        pixels,
        share,
        splits,
        C=channels,
        H=height,
        W=width,
        SIDE=side,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
    )
    return fold(partial, weight.dtype)
