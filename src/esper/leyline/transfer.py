"""Numbers on their way to a device and back, without waiting.

A plain copy between ordinary memory and a CUDA device waits until the device has done all it was
given before. These go through memory that the device reads and writes by itself: they are queued
like everything else, and whoever needs an answer waits for it alone. Such memory comes from
PyTorch's allocator, which gives none away before the copies out of it are done. On the CPU, a
copy is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

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
