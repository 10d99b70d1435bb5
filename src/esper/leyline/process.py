"""How a process that trains is set up: its memory, and when Python may collect garbage."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_BLOCK = 2**28
_LARGEST_REST = 2**30


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next tensor; return whether it could be told.

    By default glibc gives large blocks back to the system as soon as they are freed, and every
    training step gets them again page by page: a tenth of a policy update and a quarter of a small
    convolutional network's step. Blocks up to 256 MiB are kept now, up to 1 GiB in all. Other C
    libraries have no such setting, and what the environment already says is respected.
    """
    told = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in told):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_TRIM_THRESHOLD, _LARGEST_REST), (_M_MMAP_THRESHOLD, _LARGEST_BLOCK))
    return all([library.mallopt(name, value) == 1 for name, value in settings])


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage meanwhile.

    While a CUDA graph is captured, a collection could free what an earlier graph or a pinned buffer
    has left in a cycle. CUDA forbids that then, and the capture is lost.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
