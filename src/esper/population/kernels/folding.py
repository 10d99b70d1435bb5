"""Small helpers of the other kernels: sums of partial results, parameters in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
_AT_ONCE = 16


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
    block = min(_BLOCK, triton.next_power_of_2(size))
    _fold[(triton.cdiv(size, block), len(parts))](
        parts, out, parts.shape[1], size, BLOCK=block, AT_ONCE=_AT_ONCE, num_warps=4
    )
    return out


def each_in_order(parameters: Tensor) -> Tensor:
    """Return parameters [R, ...] of which each row is contiguous: views of a stack are already."""
    return parameters if parameters[0].is_contiguous() else parameters.contiguous()
