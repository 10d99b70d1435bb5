"""Clipping and SGD or AdamW over the stacks of a whole population in two launches.

A table lists all pieces of all networks' parameters: address, address of the gradient, and owner.
An owner is a host, a seed or a gate; a seed and its gate are clipped together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kasmina.training import EPSILON, SECOND_BETA
from esper.lab.population.train_step import OwnerTraining
from esper.utils.process import to_device

PIECE = 1024
"""Elements of the largest piece."""

_COLUMNS = 7
"""Columns of the table for every piece: addresses of parameters, momentum, squares and copy (0 to
3), start of its gradient (4), size (5), and owner (6)."""


@triton.jit
def _square(table, gradient, squares, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Write the sum of squares of one piece's gradient."""
    entry = tl.program_id(0)
    start = tl.load(table + entry * COLUMNS + 4)
    length = tl.load(table + entry * COLUMNS + 5)
    e = tl.arange(0, PIECE)
    g = tl.load(gradient + start + e, mask=e < length, other=0.0).to(tl.float32)
    tl.store(squares + entry, tl.sum(g * g))


@triton.jit
def _move(
    table,
    gradient,
    squares,
    first,
    partner,
    active,
    rates,
    decays,
    momenta,
    clips,
    first_scales,
    second_scales,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    COPIES: tl.constexpr,
    COPY: tl.constexpr,
    ADAMW: tl.constexpr,
    SECOND_BETA: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Take one step of one piece if its owner trains."""
    entry = tl.program_id(0)
    line = table + entry * COLUMNS
    owner = tl.load(line + 6)
    if tl.load(active + owner) != 0:
        n = tl.arange(0, PIECES)
        begin, end = tl.load(first + owner), tl.load(first + owner + 1)
        total = tl.sum(tl.load(squares + begin + n, mask=begin + n < end, other=0.0))
        other = tl.load(partner + owner)
        if other >= 0:
            begin, end = tl.load(first + other), tl.load(first + other + 1)
            total += tl.sum(tl.load(squares + begin + n, mask=begin + n < end, other=0.0))
        max_norm = tl.load(clips + owner)
        factor = max_norm / (tl.sqrt(total) + 1e-6)
        # NaN compares false, so a gradient with NaN makes its owner NaN, as it would alone.
        factor = tl.where((factor > 1.0) | (max_norm == 0.0), 1.0, factor)
        rate, decay = tl.load(rates + owner), tl.load(decays + owner)
        momentum = tl.load(momenta + owner)
        values = tl.load(line).to(tl.pointer_type(tl.float32))
        speeds = tl.load(line + 1).to(tl.pointer_type(tl.float32))
        start, length = tl.load(line + 4), tl.load(line + 5)
        e = tl.arange(0, PIECE)
        inside = e < length
        g = tl.load(gradient + start + e, mask=inside, other=0.0).to(tl.float32) * factor
        value = tl.load(values + e, mask=inside, other=0.0)
        speed = tl.load(speeds + e, mask=inside, other=0.0)
        if ADAMW:
            means = tl.load(line + 2).to(tl.pointer_type(tl.float32))
            mean = tl.load(means + e, mask=inside, other=0.0)
            speed += (g - speed) * (1.0 - momentum)
            mean = SECOND_BETA * mean + (1.0 - SECOND_BETA) * g * g
            scale = tl.load(first_scales + owner)
            root = tl.sqrt(mean) * tl.load(second_scales + owner) + EPSILON
            # The decay is no part of the gradient: it does not enter the moments.
            value = value * (1.0 - rate * decay) - rate * scale * speed / root
            tl.store(means + e, mean, mask=inside)
        else:
            g += decay * value
            # Zero times NaN would be NaN in a network without momentum.
            speed = tl.where(momentum > 0.0, momentum * speed, 0.0) + g
            value -= rate * speed
        tl.store(speeds + e, speed, mask=inside)
        tl.store(values + e, value, mask=inside)
        if COPIES:
            copies = tl.load(line + 3).to(tl.pointer_type(COPY))
            tl.store(copies + e, value.to(COPY), mask=inside)


@dataclass(frozen=True, slots=True)
class Owners:
    """The tensors of a stack for the optimizer; each network is one owner."""

    flat: Tensor
    """float32 [n, width]."""
    momentum: Tensor
    squares: Tensor | None
    """The mean of squared gradients, for AdamW; None for SGD."""
    copy: Tensor | None
    """The parameters in the compute precision, [n, width]; None if that is `flat`."""
    columns: Sequence[tuple[int, int]]
    """(start, size) of every trained tensor, in the order of its gradients."""


class Optimizer:
    """Optimizer of some stacks; owners are numbered stack by stack."""

    def __init__(
        self, stacks: Sequence[Owners], active: Tensor, partner: Tensor, training: OwnerTraining
    ) -> None:
        """Build the table; its addresses are valid until a stack moves.

        Args:
            stacks: The stacks to train.
            active: int64 [owners], 1 if an owner trains.
            partner: int64 [owners], the owner whose gradient is clipped together with this one, or
                -1.
            training: optimizer settings of every owner, in float32.
        """
        device = stacks[0].flat.device
        lines, position, owner, start, tensor = [], 0, 0, 0, 0
        first: list[int] = []
        for stack in stacks:
            rows = stack.flat.shape[0]
            # Pieces of one owner follow one another, so that it can sum their squares.
            found = []
            for column, size in stack.columns:
                offsets = np.arange(0, size, PIECE)
                row, offset = np.meshgrid(np.arange(rows), offsets, indexing="ij")
                place = row * stack.flat.shape[1] + column + offset
                copies = np.zeros_like(place)
                if stack.copy is not None:
                    copies = stack.copy.data_ptr() + place * stack.copy.element_size()
                found.append(
                    np.stack(
                        [
                            stack.flat.data_ptr() + place * 4,
                            stack.momentum.data_ptr() + place * 4,
                            np.zeros_like(place)
                            if stack.squares is None
                            else stack.squares.data_ptr() + place * 4,
                            copies,
                            start + row * size + offset,
                            np.minimum(size - offset, PIECE),
                            owner + row,
                            tensor + 0 * row,
                        ],
                        -1,
                    )
                )
                start, tensor = start + rows * size, tensor + 1
            if found:
                whole = np.concatenate(found, 1)
                first += [position + n * whole.shape[1] for n in range(rows)]
                position += rows * whole.shape[1]
                lines.append(whole.reshape(-1, _COLUMNS + 1))
            else:
                first += [position] * rows
            owner += rows
        first.append(position)
        table = np.concatenate(lines)
        tensors = table[:, _COLUMNS]
        self.piece_owner, self.piece_tensor = table[:, 6].copy(), tensors.copy()
        columns = torch.from_numpy(np.ascontiguousarray(table[:, :_COLUMNS]))
        self._table = to_device(columns, device)
        self._first = to_device(torch.tensor(first), device)
        longest = int(np.diff(np.array(first)).max())
        self._pieces = triton.next_power_of_2(max(1, longest))
        self._copy = next((s.copy.dtype for s in stacks if s.copy is not None), None)
        self.squares = torch.zeros(position, dtype=torch.float32, device=device)
        self._active, self._partner, self._training = active, partner, training
        self._is_adamw = any(stack.squares is not None for stack in stacks)

    def step(self, gradient: Tensor) -> None:
        """Clip and step all active owners; `gradient` has all tensors' gradients, concatenated."""
        entries = (len(self.squares),)
        how = self._training
        _square[entries](self._table, gradient, self.squares, COLUMNS=_COLUMNS, PIECE=PIECE)
        _move[entries](
            self._table,
            gradient,
            self.squares,
            self._first,
            self._partner,
            self._active,
            how.rates,
            how.decays,
            how.momenta,
            how.clips,
            how.first,
            how.second,
            COLUMNS=_COLUMNS,
            PIECE=PIECE,
            PIECES=self._pieces,
            COPIES=self._copy is not None,
            COPY=tl.bfloat16 if self._copy == torch.bfloat16 else tl.float32,
            ADAMW=self._is_adamw,
            SECOND_BETA=SECOND_BETA,
            EPSILON=EPSILON,
        )
