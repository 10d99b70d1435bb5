"""Batches of many rows: images gathered, shifted, mirrored and normalised in one pass.

Channels come innermost and are padded to a power of two, which is how convolutions read them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from esper.tasks.dataset import PADDING, Crops

_BLOCK = 1024


@triton.jit
def _sample(
    images,
    labels,
    order,
    top,
    left,
    flipped,
    gain,
    bias,
    out,
    targets,
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
    """Write one image of one row's batch, and its target."""
    row, sample = tl.program_id(1).to(tl.int64), tl.program_id(0)
    drawn = row * total + start + sample
    index = tl.load(order + drawn)
    place = row * tl.num_programs(0) + sample
    tl.store(targets + place, tl.load(labels + index))
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
        factor = tl.load(gain + c, mask=there, other=0.0)
        level = tl.load(bias + c, mask=there, other=0.0)
        result = value.to(tl.float32) * factor + level
        spot = place * (H * W * STEP) + n
        tl.store(out + spot, result.to(out.dtype.element_ty), mask=pixel < H * W)


def sample_images(
    images: Tensor,
    labels: Tensor,
    order: Tensor,
    crops: Crops | None,
    gain: Tensor,
    bias: Tensor,
    start: int,
    x: Tensor,
    y: Tensor,
) -> None:
    """Fill x [R, B, H, W, C'] and y [R, B] with the samples from `start` on of order [R, total].

    Args:
        images: Stored samples [N, C, H, W] of any type.
        labels: Their targets [N].
        order: int64, which samples each row sees one after another.
        crops: Tensors like `order`; None for images as they are.
        gain: float32 [C], factor that normalises; `bias` is added then.
        bias: float32 [C].
        start: Where in the order the batch begins.
        x: Contiguous; channels beyond C become 0.
        y: Contiguous, of the labels' type.
    """
    rows, batch, height, width, step = x.shape
    drawn = (order, order, order) if crops is None else (crops.top, crops.left, crops.is_flipped)
    pixels = height * width * step
    _sample[(batch, rows)](
        images,
        labels,
        order,
        *drawn,
        gain,
        bias,
        x,
        y,
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
