"""Stacked parameters: many networks of one architecture in one flat tensor, with their moments.

Entry n of `flat` holds all parameters of network n, concatenated. `leaves` are views with the
shapes of the modules' parameters, either of `flat` or of a copy in the compute precision. Norms,
clipping and the optimizer (`train_step`) work on the flat tensor in a few operations, for any
number of parameters. A stacked engine has one stack for its hosts and one per slot and blueprint;
`StackCapacity` sets the number of entries in stacks of seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from esper.kasmina.engine import Moments
from esper.lab.population.engine import SlotSpec
from esper.utils.process import to_device, write_to


class ParameterStack:
    """Parameters of n networks with the same parameter shapes, and their optimizer state."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        frozen: Collection[str] = (),
        compute: torch.dtype | None = None,
        *,
        has_squares: bool = False,
    ) -> None:
        """Create an empty stack for networks with parameters of these shapes.

        Parameters named in `frozen` are never trained. Leaves have the precision `compute`, by
        default that of the parameters. `has_squares` keeps the mean of squared gradients for AdamW.
        """
        self.shapes = dict(shapes)
        self.frozen = frozenset(frozen)
        self.width = sum(prod(shape) for shape in self.shapes.values())
        self.flat = torch.zeros((0, self.width), dtype=dtype, device=device)
        self.momentum = torch.zeros_like(self.flat)
        self.squares = torch.zeros_like(self.flat) if has_squares else None
        self.steps = torch.zeros(0, dtype=torch.int64, device=device)
        """[n], number of AdamW steps of every network."""
        self.leaves: dict[str, Tensor] = {}
        self._compute = compute or dtype
        self._view()

    def __len__(self) -> int:
        return self.flat.shape[0]

    def resize(
        self, kept: Sequence[int], entries: int, filler: Mapping[str, Tensor] | None = None
    ) -> None:
        """Set the number of entries: those in `kept`, in this order, then `filler` or zeros."""
        chosen = to_device(torch.tensor(list(kept), dtype=torch.int64), self.flat.device)
        zeros = self.flat.new_zeros((entries - len(chosen), self.width))

        def resized(values: Tensor, rest: Tensor) -> Tensor:
            return torch.cat([values.index_select(0, chosen), rest])

        self.momentum = resized(self.momentum, zeros)
        if self.squares is not None:
            self.squares = resized(self.squares, zeros)
        self.steps = resized(self.steps, self.steps.new_zeros(len(zeros)))
        if filler is not None and len(zeros):
            zeros = self._pack(filler).expand_as(zeros)
        self.flat = resized(self.flat, zeros)
        self._view()

    def write(self, entry: int, values: Mapping[str, Tensor], moments: Moments) -> None:
        """Overwrite one network."""
        self.flat[entry] = self._pack(values)[0]
        at_rest = moments.are_at_rest
        self.momentum[entry] = 0 if at_rest else self._pack(moments.momentum)[0]
        if self.squares is not None:
            self.squares[entry] = 0 if at_rest else self._pack(moments.squares)[0]
            self.steps[entry] = max(moments.steps.values(), default=0)
        if self.used is not self.flat:
            self.used[entry] = self.flat[entry].to(self._compute)

    def fill(self, networks: Sequence[Mapping[str, Tensor]]) -> None:
        """Overwrite all networks in place, with cleared optimizer state."""
        write_to(self.flat, torch.cat([self._join(values) for values in networks]))
        self.momentum.zero_()
        self.steps.zero_()
        if self.squares is not None:
            self.squares.zero_()
        self.refresh()

    def read(self, entry: int) -> tuple[dict[str, Tensor], Moments]:
        """Return copies of one network's parameters by name, and of its optimizer state."""
        values = self._unpack(self.flat[entry].clone())
        moments = Moments(self._unpack(self.momentum[entry].clone()))
        if self.squares is not None:
            moments.squares = self._unpack(self.squares[entry].clone())
            moments.steps = dict.fromkeys(self.shapes, int(self.steps[entry]))
        return values, moments

    def read_at_rest(self, entries: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return copies of some networks' parameters by name."""
        chosen = to_device(torch.tensor(list(entries), dtype=torch.int64), self.flat.device)
        return [self._unpack(values) for values in self.flat.index_select(0, chosen)]

    def refresh(self) -> None:
        """Update the leaves after the parameters have changed."""
        if self.used is not self.flat:
            self.used.copy_(self.flat)

    def columns(self) -> list[tuple[int, int]]:
        """Return (start, size) of every tensor within a network's parameters."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        return list(zip(accumulate(sizes, initial=0), sizes, strict=False))

    def tensor_norms(self, flat: Tensor) -> Tensor:
        """Return float64 [n, tensors]: the norm of every tensor of flat values [n, width].

        A tensor that is not finite has the norm NaN; other tensors are not affected.
        """
        squares, sums = flat.to(torch.float64).square(), self.norm_matrix()
        finite = torch.isfinite(squares)
        norms = (torch.where(finite, squares, torch.zeros_like(squares)) @ sums).sqrt()
        spoiled = (~finite).to(torch.float64) @ sums > 0
        return torch.where(spoiled, torch.full_like(norms, torch.nan), norms)

    def norm_matrix(self) -> Tensor:
        """Return [width, tensors], a matrix that sums squared values per parameter tensor."""
        matrix = torch.zeros((self.width, len(self.shapes)), dtype=torch.float64)
        for column, (start, size) in enumerate(self.columns()):
            matrix[start : start + size, column] = 1
        return to_device(matrix, self.flat.device)

    def _view(self) -> None:
        """Rebuild the leaves after the flat tensor was replaced."""
        same = self._compute == self.flat.dtype
        self.used = self.flat if same else self.flat.to(self._compute)
        self.leaves = {}
        for (name, shape), (start, size) in zip(self.shapes.items(), self.columns(), strict=True):
            part = self.used[:, start : start + size].view(len(self), *shape)
            self.leaves[name] = part.detach().requires_grad_(name not in self.frozen)

    def _pack(self, values: Mapping[str, Tensor]) -> Tensor:
        return to_device(self._join(values), self.flat.device).to(self.flat.dtype)

    def _join(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return [1, width]: a network's parameters, concatenated, on their device."""
        parts = [values[name].detach().reshape(1, -1) for name in self.shapes]
        return torch.cat(parts, 1) if parts else self.flat.new_zeros((1, 0))

    def _unpack(self, values: Tensor) -> dict[str, Tensor]:
        parts = values.split([size for _, size in self.columns()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}


def flatten_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return [n, width]: the gradients of the leaves, concatenated; 0 where there is none."""
    count = leaves[0].shape[0]
    parts = [
        torch.zeros_like(leaf).reshape(count, -1) if grad is None else grad.reshape(count, -1)
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]
    return torch.cat(parts, 1)


def reached_columns(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return bool [width]: parameters that get a gradient; None if all do."""
    if not any(grad is None for grad in gradients):
        return None
    parts = [
        torch.full((leaf[0].numel(),), grad is not None, device=leaf.device)
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]
    return torch.cat(parts)


Key = TypeVar("Key")

_FREE_BYTES = 2**22
"""Size in bytes of spare entries' activations below which they cost less than one capture."""

_PATIENCE = 8
"""Epochs for which a third of all entries may be spare; fewer if the layout changes anyway."""

_PATIENCE_WHEN_CHANGED = 2


@dataclass(slots=True)
class StackCapacity:
    """Number of entries in a stack of seeds: one per seed, and spare ones if `has_spares`.

    A captured CUDA graph becomes invalid when a stack changes its number of entries. So on a
    device, stacks have spare entries and keep them for a while. A spare entry costs as much compute
    as a seed. Where activations are small this is little, so there stacks start with more spare
    entries and keep them between episodes.
    """

    has_spares: bool = False
    rows: int = 1
    """Rows of the stack, the largest number of seeds at a slot."""
    sample_bytes: int = 4
    """Bytes of one channel of one position of a batch: batch size times element size."""
    _epochs_wasted: int = field(default=0, init=False)

    def entries(self, slot: SlotSpec, count: int) -> int:
        """Return the number of entries for a stack of `count` seeds at this slot."""
        if not self.has_spares:
            return count
        # If entries are cheap, add more than needed, so that the stack does not grow again soon.
        wanted = max(_and_more(count), self._least(slot)) if self.is_cheap(slot) else count
        return max(count, min(_step_up(wanted), self.rows))

    def positions(self, count: int) -> int:
        """Return the number of positions for a validation pass over `count`, with spares."""
        return max(count, min(_step_up(count), self.rows))

    def is_cheap(self, slot: SlotSpec) -> bool:
        """Whether spare entries at this slot cost less than a new capture."""
        return self.has_spares and self._least(slot) > 1

    def entries_kept(self, slot: SlotSpec, now: int, peak: int) -> int:
        """Return the number of entries of a stack to keep for the next rows.

        `peak` is the largest number of entries in use at the same time.
        """
        if not peak or not self.is_cheap(slot):
            return 0
        wanted = min(_step_up(_and_more(peak)), self.rows)
        return wanted if 2 * now > 3 * wanted else now

    def oversized(
        self, sizes: Mapping[Key, tuple[int, int]], *, has_changed: bool
    ) -> Iterator[Key]:
        """Yield the stacks that should shrink, from (entries now, entries wanted).

        Without spares, these are all stacks with unused entries. With spares, these are stacks with
        half too many, once too many entries were spare for too long. `has_changed` says that
        captures are invalid anyway.
        """
        if not self.has_spares:
            yield from (key for key, (now, wanted) in sizes.items() if now > wanted)
            return
        held = sum(now for now, _ in sizes.values())
        wasted = 3 * sum(max(0, now - wanted) for now, wanted in sizes.values()) > held
        self._epochs_wasted = self._epochs_wasted + 1 if wasted else 0
        if self._epochs_wasted > (_PATIENCE_WHEN_CHANGED if has_changed else _PATIENCE):
            self._epochs_wasted = 0
            yield from (key for key, (now, wanted) in sizes.items() if 2 * now > 3 * wanted)

    def _least(self, slot: SlotSpec) -> int:
        """Return the number of entries that cost no more than one capture."""
        own = prod(slot.shape[1:]) * self.sample_bytes
        return min(_FREE_BYTES // own, self.rows // 8)


def _and_more(count: int) -> int:
    return count + count // 4


def _step_up(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    size = 1
    while size < count:
        middle = size + size // 2
        if size > 1 and middle >= count:
            return middle
        size *= 2
    return size
