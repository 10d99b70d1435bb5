"""Random numbers by key: a stream depends on its keys, not on earlier draws.

Code that needs random numbers derives a seed from (run seed, row seed, epoch, purpose, ...) and
draws from a generator of its own. So a row never depends on other rows, and a resumed run draws
exactly the numbers that it would have drawn without the interruption.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF


def derive_seed(*keys: int | str) -> int:
    """Return a 63-bit seed that depends on every key and on their order."""
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        text = f"s{key}" if isinstance(key, str) else f"i{operator.index(key)}"
        word = text.encode()
        # The length in front separates neighbouring keys: ("ab", "c") is not ("a", "bc").
        digest.update(len(word).to_bytes(8, "little") + word)
    return int.from_bytes(digest.digest(), "little") & 0x7FFF_FFFF_FFFF_FFFF


def generator(*keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for the stream of these keys."""
    return torch.Generator(device=device).manual_seed(derive_seed(*keys))


def random_words(seeds: Tensor, count: int, first: int = 0) -> Tensor:
    """Return int64 [R, count]: 32 random bits for every index of every seed, int64 [R].

    Indices are `first`, `first` + 1, ...

    Word i of a seed is a hash of both. CPU and GPU give the same bits, for one seed or for many at
    once, and there is no generator state to save.
    """
    return words_at(seeds[:, None], torch.arange(first, first + count, device=seeds.device))


def words_at(seeds: Tensor | int, indices: Tensor) -> Tensor:
    """Return the words of `random_words` at any indices; both int64, broadcast together."""
    low, high = seeds & _WORD, (seeds >> 32) & _WORD
    return _mix((_mix((indices * 0x9E37_79B9 + low) & _WORD) + high) & _WORD)


def random_orders(seeds: Tensor, count: int) -> Tensor:
    """Return int64 [R, count]: a permutation of 0, ..., count - 1 for every seed, int64 [R]."""
    # The index in the low bits makes keys unique, so that every sort gives the same order.
    keys = (random_words(seeds, count) << 31) | torch.arange(count, device=seeds.device)
    return keys.sort(1).values & 0x7FFF_FFFF


def _mix(word: Tensor) -> Tensor:
    """Return a 32-bit hash of a 32-bit word (a bijection)."""
    word = ((word ^ (word >> 16)) * 0x7FEB_352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846C_A68B) & _WORD
    return word ^ (word >> 16)


@contextmanager
def seeded(*keys: int | str) -> Iterator[None]:
    """Seed PyTorch's CPU generator for a block, and restore its state afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derive_seed(*keys))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def drawing(device: torch.device, *keys: int | str) -> Iterator[None]:
    """Seed PyTorch's generators of the CPU and of this device for a block; see `seeded`."""
    with seeded(*keys):
        if device.type != "cuda":
            yield
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        generator.manual_seed(derive_seed(*keys))
        try:
            yield
        finally:
            generator.set_state(state)


# ---- The states of generators that belong to the user's code


def random_states(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and PyTorch, and of these."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "pytorch": torch.get_rng_state(),
        "others": [each.get_state() for each in generators],
    }


def restore_random_states(
    states: Mapping[str, Any], generators: Sequence[torch.Generator] = ()
) -> None:
    """Restore what `random_states` returned for as many generators."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["pytorch"])
    for each, state in zip(generators, states["others"], strict=True):
        each.set_state(state)


@contextmanager
def undisturbed(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the states of the global generators, and of these, after a block."""
    states = random_states(generators)
    try:
        yield
    finally:
        restore_random_states(states, generators)
