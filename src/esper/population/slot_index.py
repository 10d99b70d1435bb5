"""Which entry of a slot's seed stacks belongs to which row.

The seeds of one blueprint at one slot are entries of one stack. Entries stay where they are while a
CUDA graph captured on them is in use, and some are unused: seeds come and go by changing the
numbers here in place. Made by `seed_stacks` (training) and `validation`, read by `slot_forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

EMPTY, ISOLATED, BLENDED = 0, 1, 2
"""What an entry holds: nothing, a seed that learns apart, a seed whose output is blended in."""


@dataclass(frozen=True, slots=True)
class SlotIndexArrays:
    """The numbers of a `SlotIndex` on the CPU."""

    row_of_entry: Integers
    entry_of_row: Integers
    state: Integers
    algorithm: Integers
    gate_of_entry: Integers
    entry_of_gate: Integers
    row_of_gate: Integers
    alpha: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SlotIndex:
    """Tensors on the device for n entries, k gates and R stacked rows."""

    row_of_entry: Tensor
    """int64 [n]; any row where the entry is empty."""
    entry_of_row: Tensor
    """int64 [R], -1 where a row has none."""
    state: Tensor
    """int64 [n], EMPTY, ISOLATED or BLENDED."""
    algorithm: Tensor
    """int64 [n], how it is blended, an `AlphaAlgorithm`."""
    gate_of_entry: Tensor
    """int64 [n], -1 where an entry has none."""
    entry_of_gate: Tensor
    """int64 [k], -1 where a gate is unused."""
    row_of_gate: Tensor
    """int64 [k]; any row where the gate is unused."""
    alpha: Tensor
    """float64 [n], 1 where isolated."""

    @classmethod
    def from_arrays(cls, arrays: SlotIndexArrays, device: torch.device) -> SlotIndex:
        """Put numbers on a device."""
        return cls(*(torch.from_numpy(each).to(device) for each in _values(arrays)))

    def copy_(self, arrays: SlotIndexArrays) -> None:
        """Take over other numbers in place."""
        for mine, each in zip(_values(self), _values(arrays), strict=True):
            mine.copy_(torch.from_numpy(each))


def _values(numbers: SlotIndex | SlotIndexArrays) -> list[Any]:
    return [getattr(numbers, field.name) for field in fields(SlotIndex)]
