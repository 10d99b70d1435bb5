"""Images of many networks, element by element: depthwise convolutions, 2x2 max pools, batches.

Channels are last in memory. The backward pass of a pool compares the four values again: it reads
the activation once more, while PyTorch stores an index of eight bytes for every value and scatters.
Batches are gathered, shifted, mirrored and normalised in one pass; channels are padded to a power
of two, as convolutions read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lab.population.kernels.convolution import each_in_order, fold
from esper.lab.tasks.dataset import PADDING, Crops
from esper.leyline.actions import apply_function

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
    """Sum the gradient of one tap of every kernel of a row over a part of its pixels."""
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
        return _run_filter(x, weight, turned=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _run_filter(grad, weight, turned=True) if ctx.needs_input_grad[0] else None
        return grad_x, _weight_gradient(x, grad, weight)


def filter_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [R, B, H, W, C] filtered by weight [R, C, 1, k, k], k odd, in the same size."""
    return apply_function(_Depthwise, x.contiguous(), weight)


def _run_filter(x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
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


@triton.jit
def _pool(x, out, count, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Write the maximum of every 2x2 square; NaN counts as the maximum."""
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
    """Pass every square's gradient to the first of its largest values."""
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
        # Values at an odd edge are in no square and get no gradient.
        odd = height % 2 or width % 2
        grad_x = torch.zeros_like(x) if odd else torch.empty_like(x)
        count = grad.numel()
        _pool_back[(triton.cdiv(count, _BLOCK),)](
            x, grad, grad_x, count, H=height, W=width, C=channels, BLOCK=_BLOCK
        )
        return grad_x


def pool_max(x: Tensor) -> Tensor:
    """Return the 2x2 max pool of x [..., H, W, C]."""
    return apply_function(_MaxPool, x.contiguous())


@triton.jit
def _sample(
    images,
    order,
    top,
    left,
    flipped,
    gain,
    bias,
    out,
    start,
    total,
    pixels,
    C: tl.constexpr,
    STEP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PAD: tl.constexpr,
    CROPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one image of one row's batch."""
    row, sample = tl.program_id(1).to(tl.int64), tl.program_id(0)
    drawn = row * total + start + sample
    index = tl.load(order + drawn)
    place = row * tl.num_programs(0) + sample
    for first in range(0, pixels, BLOCK):
        n = first + tl.arange(0, BLOCK)
        c, pixel = n % STEP, n // STEP
        y, x = pixel // W, pixel % W
        there = (pixel < H * W) & (c < C)
        if CROPS:
            x = tl.where(tl.load(flipped + drawn) != 0, W - 1 - x, x)
            y = y + tl.load(top + drawn) - PAD
            x = x + tl.load(left + drawn) - PAD
        shown = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        value = tl.load(images + (index * C + c) * (H * W) + y * W + x, mask=shown, other=0)
        factor = tl.load(gain + row * C + c, mask=there, other=0.0)
        level = tl.load(bias + row * C + c, mask=there, other=0.0)
        result = value.to(tl.float32) * factor + level
        spot = place * (H * W * STEP) + n
        tl.store(out + spot, result.to(out.dtype.element_ty), mask=pixel < H * W)


def sample_images(
    images: Tensor,
    order: Tensor,
    crops: Crops | None,
    gain: Tensor,
    bias: Tensor,
    start: int,
    x: Tensor,
) -> None:
    """Fill x [R, B, H, W, C'] with the samples from `start` on of order [R, total].

    Args:
        images: Stored samples [N, C, H, W] of any type.
        order: int64, the samples of each row in order.
        crops: Tensors like `order`; None for images as they are.
        gain: float32 [R, C], normalising factor; `bias` is added after it.
        bias: float32 [R, C].
        start: Start of the batch in the order.
        x: Contiguous; channels beyond C become 0.
    """
    rows, batch, height, width, step = x.shape
    drawn = (order, order, order) if crops is None else (crops.top, crops.left, crops.is_flipped)
    pixels = height * width * step
    _sample[(batch, rows)](
        images,
        order,
        *drawn,
        gain,
        bias,
        x,
        start,
        order.shape[1],
        pixels,
        C=images.shape[1],
        STEP=step,
        H=height,
        W=width,
        PAD=PADDING,
        CROPS=crops is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(pixels)),
        num_warps=4 if pixels >= 512 else 1,
    )
