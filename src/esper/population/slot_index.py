"""Who sits where at a slot: the places of a stack of seeds, and the rows they belong to.

Places are fixed while a captured step is in use, and some are empty: seeds come and go by changing
these numbers in place.
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
"""What a place holds: nobody, a seed that learns apart, a seed that takes part."""


@dataclass(frozen=True, slots=True)
class Seating:
    """The numbers of `Seats` on the CPU."""

    rows: Integers
    holder: Integers
    state: Integers
    algorithm: Integers
    gate: Integers
    gated: Integers
    gate_rows: Integers
    alpha: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Seats:
    """Tensors on the device for n places, k gates and R stacked rows."""

    rows: Tensor
    """int64 [n], the row of every place; any where it is empty."""
    holder: Tensor
    """int64 [R], the place of every row, -1 where it has none."""
    state: Tensor
    """int64 [n], EMPTY, ISOLATED or BLENDED."""
    algorithm: Tensor
    """int64 [n], how it is blended, an `AlphaAlgorithm`."""
    gate: Tensor
    """int64 [n], the gate of every place, -1 where it has none."""
    gated: Tensor
    """int64 [k], the place of every gate, -1 where the gate is nobody's."""
    gate_rows: Tensor
    """int64 [k], the row of every gate; any where it is nobody's."""
    alpha: Tensor
    """float64 [n], 1 where isolated."""

    @classmethod
    def take(cls, seating: Seating, device: torch.device) -> Seats:
        """Put numbers on a device."""
        return cls(*(torch.from_numpy(each).to(device) for each in _all(seating)))

    def change(self, seating: Seating) -> None:
        """Take over other numbers in place."""
        for mine, each in zip(_all(self), _all(seating), strict=True):
            mine.copy_(torch.from_numpy(each))


def _all(numbers: Seats | Seating) -> list[Any]:
    return [getattr(numbers, field.name) for field in fields(Seats)]
