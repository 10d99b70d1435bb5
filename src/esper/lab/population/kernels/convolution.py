"""Convolutions of many networks at once: an implicit matrix product per row.

For one row, output [pixels, O] is the patches [pixels, k·k·C] times the weight [k·k·C, O]; patches
are gathered while they are multiplied and never written. Channels are last in memory, so that a
patch is read in a few wide pieces. The gradient of the input is the same product with a flipped
kernel. The gradient of the weight is a product over pixels, in parts that `fold` sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.leyline.actions import apply_function

_PROGRAMS_WANTED = 1056
"""Eight per multiprocessor of the largest devices; with fewer, some are idle."""

_MOST_SPLITS = 64
_REORDERED_FROM = 1024
"""Product of channels from which weights are rearranged for wide reads."""

_FOLD_BLOCK = 128
_FOLD_AT_ONCE = 16


@triton.jit
def _fold(parts, out, splits, size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sum a block of one row over all its splits, always in the same order."""
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, splits, AT_ONCE):
        n = start + tl.arange(0, AT_ONCE)
        where = (row * splits + n)[:, None] * size + e[None, :]
        inside = (n < splits)[:, None] & (e < size)[None, :]
        total += tl.sum(tl.load(parts + where, mask=inside, other=0.0), 0)
    tl.store(out + row * size + e, total.to(out.dtype.element_ty), mask=e < size)


def fold(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts [n, splits, ...] over the splits, in the precision `dtype`."""
    if parts.shape[1] == 1 and parts.dtype == dtype:
        return parts[:, 0]
    out = torch.empty((len(parts), *parts.shape[2:]), dtype=dtype, device=parts.device)
    size = out[0].numel()
    block = min(_FOLD_BLOCK, triton.next_power_of_2(size))
    _fold[(triton.cdiv(size, block), len(parts))](
        parts, out, parts.shape[1], size, BLOCK=block, AT_ONCE=_FOLD_AT_ONCE, num_warps=4
    )
    return out


def each_in_order(parameters: Tensor) -> Tensor:
    """Return parameters [R, ...] with contiguous rows; views of a stack have them already."""
    return parameters if parameters[0].is_contiguous() else parameters.contiguous()


@triton.jit
def _convolve(
    x,
    w,
    out,
    x_row,
    w_row,
    pixels,
    C: tl.constexpr,
    STEP: tl.constexpr,
    OUT: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SIDE: tl.constexpr,
    PAD: tl.constexpr,
    JOINED: tl.constexpr,
    TURNED: tl.constexpr,
    W_TAP: tl.constexpr,
    W_C: tl.constexpr,
    W_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Convolve one row's block of pixels.

    A pixel of `x` takes STEP elements, C of which count; JOINED neighbouring taps of a line are one
    piece of the product. `TURNED` reads the taps of the weight in reverse.
    """
    row = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    sample, place = p // (HO * WO), p % (HO * WO)
    y, column = place // WO, place % WO
    inside = p < pixels
    x += row * x_row
    w += row * w_row
    total = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
    for line in tl.static_range(SIDE):
        yy = y + (line - PAD)
        on_line = inside & (yy >= 0) & (yy < H)
        from_here = ((sample * H + yy) * W + column) * STEP
        for first in tl.static_range(0, SIDE, JOINED):
            for start in tl.static_range(0, JOINED * STEP, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                right, c = k // STEP + first, k % STEP
                xx = column[:, None] + (right - PAD)[None, :]
                there = on_line[:, None] & (xx >= 0) & (xx < W) & (k < JOINED * STEP)[None, :]
                spot = from_here[:, None] + ((right - PAD) * STEP + c)[None, :]
                patch = tl.load(x + spot, mask=there, other=0.0)
                tap = line * SIDE + right
                if TURNED:
                    tap = SIDE * SIDE - 1 - tap
                spot_w = (tap * W_TAP + c * W_C)[:, None] + (o * W_O)[None, :]
                known = ((k < JOINED * STEP) & (c < C))[:, None] & (o < OUT)[None, :]
                weight = tl.load(w + spot_w, mask=known, other=0.0)
                total = tl.dot(patch, weight, total, input_precision=PRECISION)
    where = (row * pixels + p)[:, None] * OUT + o[None, :]
    known = inside[:, None] & (o < OUT)[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=known)


@triton.jit
def _weigh(
    x,
    grad,
    out,
    x_row,
    pixels,
    share,
    splits,
    C: tl.constexpr,
    STEP: tl.constexpr,
    OUT: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SIDE: tl.constexpr,
    PAD: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the gradient of one piece of one row's weight over a part of its pixels."""
    part, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    PIECES: tl.constexpr = (JOINED * STEP + BLOCK_K - 1) // BLOCK_K
    PER_LINE: tl.constexpr = SIDE // JOINED * PIECES
    number = tl.program_id(0)
    block_o, number = number // (SIDE * PER_LINE), number % (SIDE * PER_LINE)
    line, number = number // PER_LINE, number % PER_LINE
    first, start = number // PIECES * JOINED, number % PIECES * BLOCK_K
    o = block_o * BLOCK_O + tl.arange(0, BLOCK_O)
    k = start + tl.arange(0, BLOCK_K)
    right, c = k // STEP + first, k % STEP
    x += row * x_row
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    for offset in range(0, share, BLOCK_P):
        p = part * share + offset + tl.arange(0, BLOCK_P)
        sample, place = p // (HO * WO), p % (HO * WO)
        y, column = place // WO, place % WO
        inside = p < pixels
        yy = y + (line - PAD)
        on_line = inside & (yy >= 0) & (yy < H)
        from_here = ((sample * H + yy) * W + column) * STEP
        xx = column[:, None] + (right - PAD)[None, :]
        there = on_line[:, None] & (xx >= 0) & (xx < W) & (k < JOINED * STEP)[None, :]
        spot = from_here[:, None] + ((right - PAD) * STEP + c)[None, :]
        patch = tl.load(x + spot, mask=there, other=0.0)
        where = (row * pixels + p)[:, None] * OUT + o[None, :]
        g = tl.load(grad + where, mask=inside[:, None] & (o < OUT)[None, :], other=0.0)
        total = tl.dot(tl.trans(patch), g, total, input_precision=PRECISION)
    out += (row * splits + part) * (SIDE * SIDE * C * OUT)
    spot = (c * (SIDE * SIDE) + line * SIDE + right)[:, None] + (o * (C * SIDE * SIDE))[None, :]
    known = ((k < JOINED * STEP) & (c < C))[:, None] & (o < OUT)[None, :]
    tl.store(out + spot, total, mask=known)


class _Convolution(torch.autograd.Function):
    """Stride 1, zeros around the image, all channels of a row connected."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return _forward(x, weight, padding, turned=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        back = weight.shape[-1] - 1 - ctx.padding
        grad_x = _forward(grad, weight, back, turned=True) if ctx.needs_input_grad[0] else None
        return grad_x, _weight_gradient(x, grad, weight, ctx.padding), None


def convolve(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Return the convolution of x [R, B, H, W, C] by weight [R, O, C, k, k]: [R, B, H', W', O].

    The rows of `x` may share memory (an expanded dimension 0), and a pixel may have padding, filled
    with finite numbers.
    """
    return apply_function(_Convolution, _in_order(x), weight, padding)


def _in_order(x: Tensor) -> Tensor:
    """Return `x` with contiguous pixels in each row."""
    step, (_, _, height, width, _) = x.stride(-2), x.shape
    line = (height * width * step, width * step, step, 1)
    is_padded = x.shape[-1] <= step <= triton.next_power_of_2(x.shape[-1])
    if is_padded and tuple(x.stride()[1:]) == line:
        return x
    return x.contiguous()


def _forward(x: Tensor, weight: Tensor, padding: int, *, turned: bool) -> Tensor:
    rows, batch, height, width, channels = x.shape
    side = weight.shape[-1]
    outputs = weight.shape[2] if turned else weight.shape[1]
    high, wide = height + 2 * padding - side + 1, width + 2 * padding - side + 1
    pixels, step = batch * high * wide, x.stride(-2)
    block_o = min(128, max(16, triton.next_power_of_2(outputs)))
    joined = side if step < 16 else 1
    block_k = min(64, max(16, triton.next_power_of_2(joined * step)))
    if x.dtype == torch.float32:
        block_k = min(block_k, 32)
    block_p = 128
    # Few small images: smaller blocks give every processor some work.
    while block_p > 32 and rows * triton.cdiv(pixels, block_p) < _PROGRAMS_WANTED:
        block_p //= 2
    weight, strides = _lay_out(weight, turned=turned)
    out = x.new_empty((rows, batch, high, wide, outputs))
    grid = (triton.cdiv(pixels, block_p), triton.cdiv(outputs, block_o), rows)
    _convolve[grid](
        x,
        weight,
        out,
        x.stride(0),
        weight.stride(0),
        pixels,
        C=channels,
        STEP=step,
        OUT=outputs,
        H=height,
        W=width,
        HO=high,
        WO=wide,
        SIDE=side,
        PAD=padding,
        JOINED=joined,
        TURNED=turned,
        **strides,
        BLOCK_P=block_p,
        BLOCK_K=block_k,
        BLOCK_O=block_o,
        PRECISION=_precision(x),
        num_warps=8 if block_o * block_p > 8192 else 4,
    )
    return out


def _lay_out(weight: Tensor, *, turned: bool) -> tuple[Tensor, dict[str, int]]:
    """Return the weight and its strides by tap, input and output; wide weights are contiguous.

    With `turned`, inputs and outputs are swapped.
    """
    _, outputs, inputs, side, _ = weight.shape
    if outputs * inputs < _REORDERED_FROM:
        weight = each_in_order(weight)
        w_c, w_o = side * side, inputs * side * side
        return weight, {"W_TAP": 1, "W_C": w_o if turned else w_c, "W_O": w_c if turned else w_o}
    order = (0, 3, 4, 1, 2) if turned else (0, 3, 4, 2, 1)
    last = inputs if turned else outputs
    return weight.permute(order).contiguous(), {"W_TAP": outputs * inputs, "W_C": last, "W_O": 1}


def _weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, padding: int) -> Tensor:
    rows, batch, height, width, channels = x.shape
    outputs, side = weight.shape[1], weight.shape[-1]
    high, wide = grad.shape[2:4]
    pixels, step = batch * high * wide, x.stride(-2)
    block_o = min(128, max(16, triton.next_power_of_2(outputs)))
    joined = side if side * step <= 128 and block_o <= 64 else 1
    most = 64 if block_o >= 128 or x.dtype == torch.float32 else 128
    block_k = min(most, max(16, triton.next_power_of_2(joined * step)))
    block_p = 64 if x.element_size() == 2 else 32
    across = side * (side // joined) * triton.cdiv(joined * step, block_k)
    across *= triton.cdiv(outputs, block_o)
    splits = triton.cdiv(_PROGRAMS_WANTED, rows * across)
    splits = max(1, min(splits, _MOST_SPLITS, triton.cdiv(pixels, 4 * block_p)))
    share = triton.cdiv(triton.cdiv(pixels, splits), block_p) * block_p
    splits = triton.cdiv(pixels, share)
    partial = torch.empty((rows, splits, *weight.shape[1:]), dtype=torch.float32, device=x.device)
    _weigh[(across, splits, rows)](
        x,
        grad,
        partial,
        x.stride(0),
        pixels,
        share,
        splits,
        C=channels,
        STEP=step,
        OUT=outputs,
        H=height,
        W=width,
        HO=high,
        WO=wide,
        SIDE=side,
        PAD=padding,
        JOINED=joined,
        BLOCK_P=block_p,
        BLOCK_K=block_k,
        BLOCK_O=block_o,
        PRECISION=_precision(x),
        num_warps=4,
    )
    return fold(partial, weight.dtype)


def _precision(x: Tensor) -> str:
    """Three TF32 products give nearly full single precision."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
