"""Counter-based randomness: a stream is named by its keys, not by what was drawn before it.

Whoever needs random numbers derives a seed from (run seed, row seed, epoch, purpose, ...) and
draws from a generator of its own. So a trajectory never depends on its neighbours, and a resumed
run continues with exactly the numbers it would have drawn.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF


def derive_seed(*keys: int | str) -> int:
    """Return a 63-bit seed that depends on every key and on their order."""
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        text = f"s{key}" if isinstance(key, str) else f"i{operator.index(key)}"
        word = text.encode()
        # The length in front keeps neighbouring keys apart: ("ab", "c") is not ("a", "bc").
        digest.update(len(word).to_bytes(8, "little") + word)
    return int.from_bytes(digest.digest(), "little") & 0x7FFF_FFFF_FFFF_FFFF


def generator(*keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh generator for the stream these keys name."""
    return torch.Generator(device=device).manual_seed(derive_seed(*keys))


def random_words(seeds: Tensor, count: int) -> Tensor:
    """Return int64 [R, count]: 32 random bits for every index of every seed, int64 [R].

    Word i of a seed is a hash of both, whatever else is drawn and wherever: the CPU and a device
    give the same bits, for one seed or for a thousand at once, without a generator to carry along.
    """
    index = torch.arange(count, device=seeds.device) * 0x9E37_79B9
    low, high = seeds[:, None] & _WORD, (seeds[:, None] >> 32) & _WORD
    return _mix((_mix((index + low) & _WORD) + high) & _WORD)


def random_orders(seeds: Tensor, count: int) -> Tensor:
    """Return int64 [R, count]: a permutation of 0, ..., count - 1 for every seed, int64 [R]."""
    # The index in the low bits keeps keys apart, so that every sort gives the same order.
    keys = (random_words(seeds, count) << 31) | torch.arange(count, device=seeds.device)
    return keys.sort(1).values & 0x7FFF_FFFF


def _mix(word: Tensor) -> Tensor:
    """Return 32 bits that all depend on all 32 bits of a word (a bijection of them)."""
    word = ((word ^ (word >> 16)) * 0x7FEB_352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846C_A68B) & _WORD
    return word ^ (word >> 16)


@contextmanager
def seeded(*keys: int | str) -> Iterator[None]:
    """Run a block whose CPU draws come from the named stream; the global state is put back."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derive_seed(*keys))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def drawing(device: torch.device, *keys: int | str) -> Iterator[None]:
    """Run a block whose draws come from the named stream, on the CPU and on this device."""
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


# ---- Numbers on their way to a device and back, without waiting


T = TypeVar("T")

Later: TypeAlias = Callable[[], T]
"""What has begun and may not have ended yet: the call waits for its end."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return numbers on a device; themselves, where they are there already."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def write_to(place: Tensor, values: Tensor) -> None:
    """Overwrite numbers in place, on whichever device they are."""
    if place.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    place.copy_(values, non_blocking=True)


def to_host(values: Tensor) -> Later[Tensor]:
    """Begin to bring numbers to the CPU as they are at this point of the current stream."""
    if not values.is_cuda:
        return lambda: values
    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    found.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return found

    return wait
