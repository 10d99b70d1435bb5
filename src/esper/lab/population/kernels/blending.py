"""A slot of many rows: gathers the inputs of seeds and blends their outputs, one pass each.

`gather_inputs` copies the rows with a seed from the host's activation; `blend_outputs` blends the
seeds' outputs and returns the activation of all rows. Use them together only: `blend_outputs`
returns the gradient of its output unchanged as that of the host's activation, and `gather_inputs`
scales it for each row. A row is a flat range of memory here, in any order of dimensions.
`SlotForward` calls both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lab.population.slot_forward import SlotIndex
from esper.leyline.actions import apply_function

_BLOCK = 2048


@triton.jit
def _blend(
    h,
    x,
    s,
    gate_values,
    entry_of_row,
    state,
    algorithm,
    alpha,
    gate_of_entry,
    out,
    size,
    per_gate,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of one row after the slot."""
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    m = tl.load(entry_of_row + row)
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
                where = tl.load(gate_of_entry + m) * (size // per_gate) + e // per_gate
                change *= tl.load(gate_values + where, mask=inside, other=0.0).to(tl.float32)
        result = host + a * change
        tl.store(out + row * size + e, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _blend_back(
    grad,
    x,
    s,
    gate_values,
    row_of_entry,
    state,
    algorithm,
    alpha,
    gate_of_entry,
    grad_x,
    grad_s,
    size,
    per_gate,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the gradients of one entry's input and output."""
    m = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    here = m * size + e
    if tl.load(state + m) == 0:
        nothing = tl.zeros((BLOCK,), dtype=tl.float32).to(grad_x.dtype.element_ty)
        tl.store(grad_x + here, nothing, mask=inside)
        tl.store(grad_s + here, nothing, mask=inside)
    else:
        row = tl.load(row_of_entry + m)
        g = tl.load(grad + row * size + e, mask=inside, other=0.0).to(tl.float32)
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
                    where = tl.load(gate_of_entry + m) * (size // per_gate) + e // per_gate
                    opening = tl.load(gate_values + where, mask=inside, other=0.0).to(tl.float32)
                    to_seed = to_seed * opening
            to_host = g - to_seed
        tl.store(grad_x + here, to_host.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_s + here, to_seed.to(grad_s.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(
    grad,
    x,
    s,
    row_of_entry,
    state,
    alpha,
    entry_of_gate,
    out,
    size,
    per_gate,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one value of one gate, a sum over the values it scales."""
    number, value = tl.program_id(1).to(tl.int64), tl.program_id(0)
    m = tl.load(entry_of_gate + number)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if m >= 0:
        if tl.load(state + m) != 0:
            row = tl.load(row_of_entry + m)
            a = tl.load(alpha + m).to(tl.float32)
            for start in range(0, per_gate, BLOCK):
                e = start + tl.arange(0, BLOCK)
                inside = e < per_gate
                here = value * per_gate + e
                g = tl.load(grad + row * size + here, mask=inside, other=0.0).to(tl.float32)
                host = tl.load(x + m * size + here, mask=inside, other=0.0).to(tl.float32)
                seed = tl.load(s + m * size + here, mask=inside, other=0.0).to(tl.float32)
                total += a * g * (seed - host)
    where = number * (size // per_gate) + value
    tl.store(out + where, tl.sum(total).to(out.dtype.element_ty))


@triton.jit
def _gather_back(
    passed,
    grad_x,
    grad_parts,
    grad_gates,
    entry_of_row,
    state,
    gate_of_entry,
    out,
    size,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the gradient of one row before the slot."""
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    m = tl.load(entry_of_row + row)
    there = tl.load(state + tl.maximum(m, 0))
    if (m < 0) | (there != 2):
        value = tl.load(passed + row * size + e, mask=inside, other=0.0)
        tl.store(out + row * size + e, value, mask=inside)
    else:
        here = m * size + e
        total = tl.load(grad_x + here, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(grad_parts + here, mask=inside, other=0.0).to(tl.float32)
        if GATES:
            g = tl.load(gate_of_entry + m)
            if g >= 0:
                total += tl.load(grad_gates + g * size + e, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * size + e, total.to(out.dtype.element_ty), mask=inside)


class _GatherInputs(torch.autograd.Function):
    """(h) -> (h, inputs of the entries, inputs of the gates, inputs of each module's entries)."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, index: SlotIndex, counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.index = index
        x = h.index_select(0, index.row_of_entry)
        gates = h.index_select(0, index.row_of_gate)
        return (h, x, gates, *x.detach().split(counts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index: SlotIndex = ctx.index
        passed, grad_x = grads[0].contiguous(), grads[1].contiguous()
        parts = grads[3] if len(grads) == 4 else torch.cat(grads[3:])
        out = torch.empty_like(passed)
        size = passed[0].numel()
        has_gates = len(index.entry_of_gate) > 0
        _gather_back[(triton.cdiv(size, _BLOCK), len(passed))](
            passed,
            grad_x,
            parts.contiguous(),
            grads[2].contiguous() if has_gates else parts,
            index.entry_of_row,
            index.state,
            index.gate_of_entry,
            out,
            size,
            GATES=has_gates,
            BLOCK=_BLOCK,
        )
        return out, None, None


class _BlendOutputs(torch.autograd.Function):
    """(h, entries' input, entries' output, gates' values) -> the activation after the slot."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, x: Tensor, s: Tensor, gate_values: Tensor | None, index: SlotIndex
    ) -> Tensor:
        out, size = torch.empty_like(h), h[0].numel()
        per_gate = size if gate_values is None else size // gate_values[0].numel()
        _blend[(triton.cdiv(size, _BLOCK), len(h))](
            h,
            x,
            s,
            x if gate_values is None else gate_values,
            index.entry_of_row,
            index.state,
            index.algorithm,
            index.alpha,
            index.gate_of_entry,
            out,
            size,
            per_gate,
            GATES=gate_values is not None,
            BLOCK=_BLOCK,
        )
        ctx.save_for_backward(x, s, gate_values)
        ctx.index, ctx.per_gate = index, per_gate
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, s, gate_values = ctx.saved_tensors
        index: SlotIndex = ctx.index
        grad = grads[0].contiguous()
        grad_x, grad_s = torch.empty_like(x), torch.empty_like(s)
        size = x[0].numel()
        _blend_back[(triton.cdiv(size, _BLOCK), len(x))](
            grad,
            x,
            s,
            x if gate_values is None else gate_values,
            index.row_of_entry,
            index.state,
            index.algorithm,
            index.alpha,
            index.gate_of_entry,
            grad_x,
            grad_s,
            size,
            ctx.per_gate,
            GATES=gate_values is not None,
            BLOCK=_BLOCK,
        )
        grad_gate_values = None
        if gate_values is not None:
            grad_gate_values = torch.empty_like(gate_values)
            block = min(_BLOCK, triton.next_power_of_2(ctx.per_gate))
            _gate_back[(size // ctx.per_gate, len(gate_values))](
                grad,
                x,
                s,
                index.row_of_entry,
                index.state,
                index.alpha,
                index.entry_of_gate,
                grad_gate_values,
                size,
                ctx.per_gate,
                BLOCK=block,
                num_warps=1 if block <= 256 else 4,
            )
        return grad, grad_x, grad_s, grad_gate_values, None


def gather_inputs(
    h: Tensor, index: SlotIndex, counts: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return h, the inputs of all entries, of all gates, and of each module's `counts` entries."""
    found = _GatherInputs.apply(h.contiguous(), index, counts)  # type: ignore[no-untyped-call]
    return found[0], found[1], found[2], tuple(found[3:])


def blend_outputs(
    h: Tensor, x: Tensor, s: Tensor, gate_values: Tensor | None, index: SlotIndex
) -> Tensor:
    """Return the activations of all rows; `gate_values` [k, values] scale the seeds' part."""
    if gate_values is not None:
        gate_values = gate_values.contiguous()
    return apply_function(_BlendOutputs, h, x, s.contiguous(), gate_values, index)
