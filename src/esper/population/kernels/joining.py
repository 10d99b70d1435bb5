"""Seeds of many rows joined to their hosts: gathered, blended and put back in one pass each way.

`enter` takes the rows that have a seed out of the host's activation; `leave` blends what the seeds
made of them and returns the activation of all rows. They belong together: `leave` hands the
gradient of its output back unchanged as that of the host's activation, and `enter` knows whose
it is. A row is one flat run of memory here, whatever the order of its dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.slot_index import Seats

_BLOCK = 2048


@triton.jit
def _blend(
    h,
    x,
    s,
    opening,
    holder,
    state,
    algorithm,
    alpha,
    gate,
    out,
    size,
    per_opening,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of one row behind the slot."""
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    m = tl.load(holder + row)
    there = tl.load(state + tl.maximum(m, 0))
    if (m < 0) | (there != 2):
        value = tl.load(h + row * size + e, mask=inside, other=0.0)
        tl.store(out + row * size + e, value, mask=inside)
    else:
        host = tl.load(x + m * size + e, mask=inside, other=0.0).to(tl.float32)
        seed = tl.load(s + m * size + e, mask=inside, other=0.0).to(tl.float32)
        how, a = tl.load(algorithm + m), tl.load(alpha + m).to(tl.float32)
        change = seed - host
        if how == 1:
            change = host * (2.0 * tl.sigmoid(2.0 * change) - 1.0)
        if GATES:
            if how == 2:
                where = tl.load(gate + m) * (size // per_opening) + e // per_opening
                change *= tl.load(opening + where, mask=inside, other=0.0).to(tl.float32)
        result = host + a * change
        tl.store(out + row * size + e, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _blend_back(
    grad,
    x,
    s,
    opening,
    rows,
    state,
    algorithm,
    alpha,
    gate,
    grad_x,
    grad_s,
    size,
    per_opening,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the gradients of one place's input and output."""
    m = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    here = m * size + e
    if tl.load(state + m) == 0:
        nothing = tl.zeros((BLOCK,), dtype=tl.float32).to(grad_x.dtype.element_ty)
        tl.store(grad_x + here, nothing, mask=inside)
        tl.store(grad_s + here, nothing, mask=inside)
    else:
        g = tl.load(grad + tl.load(rows + m) * size + e, mask=inside, other=0.0).to(tl.float32)
        how, a = tl.load(algorithm + m), tl.load(alpha + m).to(tl.float32)
        if how == 1:
            host = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
            seed = tl.load(s + here, mask=inside, other=0.0).to(tl.float32)
            bent = 2.0 * tl.sigmoid(2.0 * (seed - host)) - 1.0
            to_seed = a * g * host * (1.0 - bent * bent)
            to_host = g * (1.0 + a * bent) - to_seed
        else:
            to_seed = a * g
            if GATES:
                if how == 2:
                    where = tl.load(gate + m) * (size // per_opening) + e // per_opening
                    open_ = tl.load(opening + where, mask=inside, other=0.0).to(tl.float32)
                    to_seed = to_seed * open_
            to_host = g - to_seed
        tl.store(grad_x + here, to_host.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_s + here, to_seed.to(grad_s.dtype.element_ty), mask=inside)


@triton.jit
def _open_back(
    grad,
    x,
    s,
    rows,
    state,
    alpha,
    gated,
    out,
    size,
    per_opening,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one value of one gate: a sum over what it lets in."""
    number, value = tl.program_id(1).to(tl.int64), tl.program_id(0)
    m = tl.load(gated + number)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if m >= 0:
        if tl.load(state + m) != 0:
            row = tl.load(rows + m)
            a = tl.load(alpha + m).to(tl.float32)
            for start in range(0, per_opening, BLOCK):
                e = start + tl.arange(0, BLOCK)
                inside = e < per_opening
                here = value * per_opening + e
                g = tl.load(grad + row * size + here, mask=inside, other=0.0).to(tl.float32)
                host = tl.load(x + m * size + here, mask=inside, other=0.0).to(tl.float32)
                seed = tl.load(s + m * size + here, mask=inside, other=0.0).to(tl.float32)
                total += a * g * (seed - host)
    where = number * (size // per_opening) + value
    tl.store(out + where, tl.sum(total).to(out.dtype.element_ty))


@triton.jit
def _return(
    passed,
    grad_x,
    grad_parts,
    grad_gates,
    holder,
    state,
    gate,
    out,
    size,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the gradient of one row before the slot."""
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    m = tl.load(holder + row)
    there = tl.load(state + tl.maximum(m, 0))
    if (m < 0) | (there != 2):
        value = tl.load(passed + row * size + e, mask=inside, other=0.0)
        tl.store(out + row * size + e, value, mask=inside)
    else:
        here = m * size + e
        total = tl.load(grad_x + here, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(grad_parts + here, mask=inside, other=0.0).to(tl.float32)
        if GATES:
            g = tl.load(gate + m)
            if g >= 0:
                total += tl.load(grad_gates + g * size + e, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * size + e, total.to(out.dtype.element_ty), mask=inside)


class _Enter(torch.autograd.Function):
    """(h) -> (h, what the places see, what the gates see, what each part's places see)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, seats: Seats, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.seats = seats
        x = h.index_select(0, seats.rows)
        gates = h.index_select(0, seats.gate_rows)
        return (h, x, gates, *x.detach().split(counts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        seats: Seats = ctx.seats
        passed, grad_x = grads[0].contiguous(), grads[1].contiguous()
        parts = grads[3] if len(grads) == 4 else torch.cat(grads[3:])
        out = torch.empty_like(passed)
        size = passed[0].numel()
        has_gates = len(seats.gated) > 0
        _return[(triton.cdiv(size, _BLOCK), len(passed))](
            passed,
            grad_x,
            parts.contiguous(),
            grads[2].contiguous() if has_gates else parts,
            seats.holder,
            seats.state,
            seats.gate,
            out,
            size,
            GATES=has_gates,
            BLOCK=_BLOCK,
        )
        return out, None, None


class _Leave(torch.autograd.Function):
    """(h, places' input, places' output, gates' opening) -> the activation behind the slot."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, x: Tensor, s: Tensor, opening: Tensor | None, seats: Seats
    ) -> Tensor:
        out, size = torch.empty_like(h), h[0].numel()
        per_opening = size if opening is None else size // opening[0].numel()
        _blend[(triton.cdiv(size, _BLOCK), len(h))](
            h,
            x,
            s,
            x if opening is None else opening,
            seats.holder,
            seats.state,
            seats.algorithm,
            seats.alpha,
            seats.gate,
            out,
            size,
            per_opening,
            GATES=opening is not None,
            BLOCK=_BLOCK,
        )
        ctx.save_for_backward(x, s, opening)
        ctx.seats, ctx.per_opening = seats, per_opening
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, s, opening = ctx.saved_tensors
        seats: Seats = ctx.seats
        grad = grads[0].contiguous()
        grad_x, grad_s = torch.empty_like(x), torch.empty_like(s)
        size = x[0].numel()
        _blend_back[(triton.cdiv(size, _BLOCK), len(x))](
            grad,
            x,
            s,
            x if opening is None else opening,
            seats.rows,
            seats.state,
            seats.algorithm,
            seats.alpha,
            seats.gate,
            grad_x,
            grad_s,
            size,
            ctx.per_opening,
            GATES=opening is not None,
            BLOCK=_BLOCK,
        )
        grad_opening = None
        if opening is not None:
            grad_opening = torch.empty_like(opening)
            block = min(_BLOCK, triton.next_power_of_2(ctx.per_opening))
            _open_back[(size // ctx.per_opening, len(opening))](
                grad,
                x,
                s,
                seats.rows,
                seats.state,
                seats.alpha,
                seats.gated,
                grad_opening,
                size,
                ctx.per_opening,
                BLOCK=block,
                num_warps=1 if block <= 256 else 4,
            )
        return grad, grad_x, grad_s, grad_opening, None


def enter(
    h: Tensor, seats: Seats, counts: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return h, the inputs of all places, of all gates, and of each part's `counts` places."""
    found = _Enter.apply(h.contiguous(), seats, counts)  # type: ignore[no-untyped-call]
    return found[0], found[1], found[2], tuple(found[3:])


def leave(h: Tensor, x: Tensor, s: Tensor, opening: Tensor | None, seats: Seats) -> Tensor:
    """Return the activations of all rows; `opening` [k, values] lets a place's output in."""
    if opening is not None:
        opening = opening.contiguous()
    out: Tensor = _Leave.apply(  # type: ignore[no-untyped-call]
        h, x, s.contiguous(), opening, seats
    )
    return out
