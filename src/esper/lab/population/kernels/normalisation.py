"""GroupNorm of many networks at once, with a following ReLU and residual sum, in one pass.

One program processes one group of one sample: it reads the activation once and writes the
normalised, scaled and shifted one, after ReLU and residual sum if there are any. The backward pass
reads activation and gradient once and writes one gradient; the ReLU's mask is computed again, not
stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lab.population.kernels.convolution import each_in_order, fold
from esper.leyline.actions import apply_function

LARGEST_GROUP = 32_768
"""Elements of the largest group that one program can hold."""


@triton.jit
def _normalise(
    x,
    weight,
    bias,
    residual,
    out,
    kept,
    eps,
    weight_row,
    bias_row,
    batch,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Normalise one group of one sample; write its mean and inverse deviation to `kept`."""
    number = tl.program_id(0).to(tl.int64)
    group, sample = number % GROUPS, number // GROUPS
    row = sample // batch
    WIDE: tl.constexpr = C // GROUPS
    c, a = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_A)
    inside = (a < AREA)[:, None] & (c < WIDE)[None, :]
    here = sample * (C * AREA) + group * WIDE + a[:, None] * C + c[None, :]
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    SIZE: tl.constexpr = WIDE * AREA
    mean = tl.sum(value) / SIZE
    centred = tl.where(inside, value - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred) / SIZE + eps)
    channel = group * WIDE + c
    gain = tl.load(weight + row * weight_row + channel, mask=c < WIDE, other=0.0).to(tl.float32)
    shift = tl.load(bias + row * bias_row + channel, mask=c < WIDE, other=0.0).to(tl.float32)
    result = centred * inverse * gain[None, :] + shift[None, :]
    if RELU:
        # Not `maximum`, which may drop NaN: a row that is not finite must stay so.
        result = tl.where(result < 0.0, 0.0, result)
    if RESIDUAL:
        result += tl.load(residual + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, result.to(out.dtype.element_ty), mask=inside)
    tl.store(kept + number * 2, mean)
    tl.store(kept + number * 2 + 1, inverse)


@triton.jit
def _normalise_back(
    x,
    weight,
    bias,
    grad,
    kept,
    grad_x,
    sums,
    weight_row,
    bias_row,
    batch,
    samples,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    RELU: tl.constexpr,
):
    """Backward pass of one group of one sample; gradients of gain and shift go to `sums`."""
    number = tl.program_id(0).to(tl.int64)
    group, sample = number % GROUPS, number // GROUPS
    row = sample // batch
    WIDE: tl.constexpr = C // GROUPS
    c, a = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_A)
    inside = (a < AREA)[:, None] & (c < WIDE)[None, :]
    here = sample * (C * AREA) + group * WIDE + a[:, None] * C + c[None, :]
    mean, inverse = tl.load(kept + number * 2), tl.load(kept + number * 2 + 1)
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (value - mean) * inverse, 0.0)
    channel = group * WIDE + c
    gain = tl.load(weight + row * weight_row + channel, mask=c < WIDE, other=0.0).to(tl.float32)
    if RELU:
        shift = tl.load(bias + row * bias_row + channel, mask=c < WIDE, other=0.0).to(tl.float32)
        g = tl.where(normal * gain[None, :] + shift[None, :] <= 0.0, 0.0, g)
    spot = sample * C + group * WIDE + c
    tl.store(sums + spot, tl.sum(g * normal, 0), mask=c < WIDE)
    tl.store(sums + samples * C + spot, tl.sum(g, 0), mask=c < WIDE)
    g = g * gain[None, :]
    SIZE: tl.constexpr = WIDE * AREA
    level, slope = tl.sum(g) / SIZE, tl.sum(g * normal) / SIZE
    result = (g - level - normal * slope) * inverse
    tl.store(grad_x + here, result.to(grad_x.dtype.element_ty), mask=inside)


class _Normalisation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> Tensor:
        weight, bias = each_in_order(weight), each_in_order(bias)
        out = torch.empty_like(x)
        samples = x.shape[0] * x.shape[1]
        kept = torch.empty((samples * groups, 2), dtype=torch.float32, device=x.device)
        sizes = _sizes(x, groups)
        _normalise[(samples * groups,)](
            x,
            weight,
            bias,
            residual if residual is not None else x,
            out,
            kept,
            eps,
            weight.stride(0),
            bias.stride(0),
            x.shape[1],
            RELU=relu,
            RESIDUAL=residual is not None,
            **sizes,
        )
        ctx.save_for_backward(x, weight, bias, kept)
        ctx.relu, ctx.sizes = relu, sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
        grad_x = torch.empty_like(x)
        sums = torch.empty((2, rows, batch, channels), dtype=torch.float32, device=x.device)
        _normalise_back[(len(kept),)](
            x,
            weight,
            bias,
            grad,
            kept,
            grad_x,
            sums,
            weight.stride(0),
            bias.stride(0),
            batch,
            rows * batch,
            RELU=ctx.relu,
            **ctx.sizes,
        )
        both = fold(sums.flatten(0, 1), weight.dtype).unflatten(0, (2, rows))
        residual = grad if ctx.needs_input_grad[3] else None
        return grad_x, both[0], both[1], residual, None, None, None


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    *,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return GroupNorm of x [R, B, ..., C] by weight and bias [R, C], then ReLU, then the sum."""
    if residual is not None:
        residual = residual.contiguous()
    return apply_function(_Normalisation, x.contiguous(), weight, bias, residual, groups, eps, relu)


def _sizes(x: Tensor, groups: int) -> dict[str, int]:
    channels = x.shape[-1]
    area = x[0, 0].numel() // channels
    block_c, block_a = triton.next_power_of_2(channels // groups), triton.next_power_of_2(area)
    warps = min(16, max(1, block_c * block_a // 1024))
    return {
        "C": channels,
        "GROUPS": groups,
        "AREA": area,
        "BLOCK_C": block_c,
        "BLOCK_A": block_a,
        "num_warps": warps,
    }
