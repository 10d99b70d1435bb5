"""The policy's random numbers: one for every row and head of a step, from a counter alone.

A draw is a hash of (run, round, step, row, head), computed for all rows in a few tensor operations.
So rows that share an environment still act differently, a row draws the same whatever the number
of rows beside it, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.randomness import derive_seed

_NUM_HEADS = len(HEAD_NAMES)
_BITS = 24
"""Bits of a draw: what float32 holds exactly, so that none is rounded up to 1."""

# The steps of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def draw_uniforms(
    rows: int, *keys: int | str, device: torch.device | str = "cpu", columns: int = _NUM_HEADS
) -> Tensor:
    """Return float32 [rows, columns] from [0, 1); row r depends on the keys and on r alone."""
    seed = derive_seed(*keys)
    place = torch.arange(rows * columns, dtype=torch.int64, device=device)
    # Hashed twice: neighbouring counters and neighbouring seeds must have nothing in common.
    word = _mix(_mix(place * _signed(_GOLDEN) + seed) + _signed(_GOLDEN))
    uniforms = _shift(word, 64 - _BITS).to(torch.float32) / float(2**_BITS)
    return uniforms.view(rows, columns)


def _mix(word: Tensor) -> Tensor:
    """Return every 64-bit word scrambled; products wrap around, which is meant."""
    for bits, factor in _MIX:
        word = (word ^ _shift(word, bits)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Return the word shifted to the right with zeros coming in, which int64 does not do."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
