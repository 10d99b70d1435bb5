"""Many small tensors as a few strings of bytes, and back, bit for bit.

What is seen of rows is some sixty tensors of a few numbers each. One by one they cost more in
handling than in bytes: a copy from and to a device each, an object of the cluster each. So tensors
of one type are put end to end; whole numbers take as few bytes as the largest of their tensor
needs, and truths one bit. That is a third of the bytes, and Ray hands small answers over directly
instead of through its store.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TYPES = (torch.bool, torch.int64, torch.float32, torch.float64)
"""What can be packed."""

_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
"""What whole numbers are written as: the first that holds all of a tensor."""

_LARGEST = np.array([np.iinfo(width).max for width in _WIDTHS[:-1]])

_Field = tuple[str, torch.dtype, tuple[int, ...]]
"""A tensor's name, its type, and its shape without the rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors of some rows; the first dimension of each is the rows."""

    layout: bytes
    """How many rows and which tensors; the same bytes for the same tensors."""
    bits: bytes
    """All truths."""
    widths: bytes
    """For every tensor of whole numbers, the index of its width."""
    whole: tuple[bytes, ...]
    """All whole numbers, by width."""
    single: bytes
    """All float32."""
    double: bytes
    """All float64."""


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Return tensors [R, ...], all on one device, in a form that travels well."""
    rows = len(next(iter(tensors.values())))
    fields = tuple((name, each.dtype, tuple(each.shape[1:])) for name, each in tensors.items())
    layout = _dump_layout(rows, fields)
    bits, numbers, single, double = (_end_to_end(tensors, kind) for kind in _TYPES)
    widths, whole = _narrow(numbers, _load_layout(layout).sizes(torch.int64))
    return Packed(
        layout=layout,
        bits=np.packbits(bits).tobytes(),
        widths=widths.tobytes(),
        whole=whole,
        single=single.tobytes(),
        double=double.tobytes(),
    )


def unpack(
    parts: Sequence[Packed], order: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return the tensors of the rows of several packets.

    Args:
        parts: packets of the same tensors.
        order: row r is row order[r] of the parts one after another; by default as they stand.
        device: where the tensors are wanted; all of a type are one copy.
    """
    layouts = tuple(part.layout for part in parts)
    found: dict[str, Tensor] = {}
    for kind in _TYPES:
        plan = _plan(layouts, None if order is None else tuple(order), kind)
        if plan.names:
            values = np.concatenate([_values(part, kind) for part in parts])[plan.places]
            pieces = torch.from_numpy(values).to(device).split(plan.sizes)
            for name, shape, piece in zip(plan.names, plan.shapes, pieces, strict=True):
                found[name] = piece.view(shape)
    return found


@dataclass(frozen=True)
class _Layout:
    """Which tensors there are, and of how many rows."""

    rows: int
    fields: tuple[_Field, ...]

    def of(self, kind: torch.dtype) -> list[tuple[str, tuple[int, ...]]]:
        """Return the tensors of a type, each with the shape of a row."""
        return [(name, tail) for name, own, tail in self.fields if own == kind]

    def sizes(self, kind: torch.dtype) -> list[int]:
        """Return how many numbers every tensor of a type has."""
        return [self.rows * math.prod(tail) for _, tail in self.of(kind)]


@lru_cache(maxsize=64)
def _dump_layout(rows: int, fields: tuple[_Field, ...]) -> bytes:
    return pickle.dumps((rows, [(name, _TYPES.index(kind), tail) for name, kind, tail in fields]))


@lru_cache(maxsize=64)
def _load_layout(layout: bytes) -> _Layout:
    rows, fields = pickle.loads(layout)
    return _Layout(rows, tuple((name, _TYPES[index], tail) for name, index, tail in fields))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How all tensors of a type come out of the parts."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    places: NDArray[np.int64]
    """Where each number stands in the parts one after another."""


@lru_cache(maxsize=64)
def _plan(layouts: tuple[bytes, ...], order: tuple[int, ...] | None, kind: torch.dtype) -> _Plan:
    """Work out where numbers go; that is the same in every step of a round."""
    parts = [_load_layout(each) for each in layouts]
    whole = _Layout(sum(part.rows for part in parts), parts[0].fields)
    assert all(part.fields == whole.fields for part in parts), "parts have the same tensors"
    picked = np.arange(whole.rows) if order is None else np.array(order)
    # Places go the way that the numbers will go.
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in whole.of(kind)]
    start = 0
    for part in parts:
        for own, size in zip(pieces, part.sizes(kind), strict=True):
            own.append(np.arange(start, start + size).reshape(part.rows, -1))
            start += size
    places = [np.concatenate(own)[picked].ravel() for own in pieces]
    return _Plan(
        names=[name for name, _ in whole.of(kind)],
        shapes=[(whole.rows, *tail) for _, tail in whole.of(kind)],
        sizes=whole.sizes(kind),
        places=np.concatenate([np.empty(0, np.int64), *places]),
    )


def _end_to_end(tensors: Mapping[str, Tensor], kind: torch.dtype) -> NDArray[Any]:
    """Return all tensors of a type as one array; that is one copy from a device."""
    own = [tensor.reshape(-1) for tensor in tensors.values() if tensor.dtype == kind]
    joined: NDArray[Any] = (torch.cat(own) if own else torch.empty(0, dtype=kind)).cpu().numpy()
    return joined


def _narrow(
    numbers: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[NDArray[np.uint8], tuple[bytes, ...]]:
    """Return the width of every tensor, and all numbers by width."""
    widths = np.zeros(len(sizes), dtype=np.uint8)
    filled = [index for index, size in enumerate(sizes) if size]
    if filled:
        starts = np.cumsum([0, *sizes])[filled]
        low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
        # A negative number needs what its complement needs: -128 fits where 127 does.
        widths[filled] = np.searchsorted(_LARGEST, np.maximum(high, ~low))
    by_number = np.repeat(widths, sizes)
    return widths, tuple(
        numbers[by_number == index].astype(width).tobytes() for index, width in enumerate(_WIDTHS)
    )


def _values(part: Packed, kind: torch.dtype) -> NDArray[Any]:
    """Return all numbers of a type as they were before they were packed."""
    if kind == torch.float32:
        return np.frombuffer(part.single, np.float32)
    if kind == torch.float64:
        return np.frombuffer(part.double, np.float64)
    sizes = _load_layout(part.layout).sizes(kind)
    if kind == torch.bool:
        bits = np.unpackbits(np.frombuffer(part.bits, np.uint8), count=sum(sizes))
        return bits.view(np.bool_)
    numbers = np.empty(sum(sizes), dtype=np.int64)
    by_number = np.repeat(np.frombuffer(part.widths, np.uint8), sizes)
    for index, width in enumerate(_WIDTHS):
        numbers[by_number == index] = np.frombuffer(part.whole[index], width)
    return numbers
