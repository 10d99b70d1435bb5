"""What tests of a CUDA device need."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def busy_device(cycles: int) -> Iterator[torch.cuda.Event]:
    """Keep the device busy for so many cycles; to wait for it within the block is an error.

    Yields:
        The end of the time: not reached as long as nobody has waited.
    """
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # PyTorch tells once that it does not find every way to wait.
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(cycles)
        end = torch.cuda.Event()
        end.record()
        yield end
    finally:
        torch.cuda.set_sync_debug_mode("default")
