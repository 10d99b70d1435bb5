"""Counter-based randomness: a stream is named by its keys, not by what was drawn before it.

Whoever needs random numbers derives a seed from (run seed, row seed, epoch, purpose, ...) and
draws from a generator of its own. So a trajectory never depends on its neighbours, and a resumed
run continues with exactly the numbers it would have drawn.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
