"""The process and its machine: device, memory, garbage collection, software versions.

PyTorch is imported where it is needed, because commands that only read a run do not need it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from esper._version import __version__
from esper.leyline.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1")
    if hasattr(signal, name)
)
"""Signals that make a run save and stop: Ctrl-C, `kill`, a closed terminal, a time limit, and the
warning that batch systems send before they end a job.
"""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_BLOCK = 2**28
_LARGEST_REST = 2**30


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensor; return whether it does now.

    By default glibc returns large blocks to the system as soon as they are freed, and every
    training step gets them back page by page. That takes a tenth of a policy update and a quarter
    of a small convolutional network's step. Now blocks up to 256 MiB are kept, up to 1 GiB in all.
    Settings in the environment are respected.
    """
    variables = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in variables):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_TRIM_THRESHOLD, _LARGEST_REST), (_M_MMAP_THRESHOLD, _LARGEST_BLOCK))
    return all([library.mallopt(name, value) == 1 for name, value in settings])


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable Python's garbage collection within the block.

    During the capture of a CUDA graph, a collection could free an earlier graph or a pinned buffer.
    CUDA forbids that, and the capture fails.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Capture the CUDA work of a block into a graph.

    cuBLAS keeps a workspace per stream. One from before the capture may belong to another graph,
    which may run at the same time or be freed earlier. So the workspaces are cleared before the
    capture and after it.

    Args:
        graph: an empty graph.
        options: those of `torch.cuda.graph`.
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()
    try:
        with without_collections(), torch.cuda.graph(graph, **options):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def choose_device(name: str | torch.device) -> torch.device:
    """Return the named device; 'auto' is a CUDA device if there is one, else the CPU."""
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"no device is called {name!r}; use 'auto', 'cpu', 'cuda' or one such as 'cuda:0'"
        ) from None
    if device.type == "cuda" and not has_cuda:
        raise UsageError(
            "this machine has no CUDA device; use --device cpu (in Python: device='cpu')"
        )
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count and device.index is not None and device.index >= count:
        raise UsageError(f"there is no {device}; this machine has cuda:0 to cuda:{count - 1}")
    return device


@lru_cache(maxsize=1)
def software_versions() -> dict[str, str]:
    """Return the software versions needed to reproduce a run."""
    import numpy
    import torch

    return {
        "esper": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = file.read().split()[1]
    except (OSError, ValueError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Return the memory that a process may still take; None if the system does not report it."""
    found: list[int] = []
    try:
        with open("/proc/meminfo", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines())
        found.append(1024 * int(lines[b"MemAvailable"].split()[0]))
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        # A container has a limit of its own.
        with open("/sys/fs/cgroup/memory.max", "rb") as file:
            found.append(int(file.read()))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def gpu_memory_share(device: torch.device) -> float | None:
    """Return the share of a CUDA device's memory in use by all processes; None on a CPU."""
    import torch

    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return 1.0 - free / total


# ---- Modules of users, given by module name or by file


def is_file_name(name: str) -> bool:
    """Return whether a module is given by its file."""
    return name.endswith(".py") or os.sep in name


def find_module(name: str) -> str:
    """Return the import name of a module that is given by name or by file.

    The folder of the file (for a name, the current folder) is added to `sys.path`, as Python does
    for a script. Worker processes can then import its classes by name.

    Raises:
        UsageError: There is no such file, or its name cannot be imported.
    """
    module, folder = name, os.getcwd()
    if is_file_name(name):
        path = os.path.abspath(name)
        if not os.path.isfile(path):
            raise UsageError("there is no such file")
        folder, file = os.path.split(path)
        module = file.removesuffix(".py")
        if not module.isidentifier():
            raise UsageError(f"{module!r} cannot be the name of a module")
        known = find_spec(module)
        if known is not None and (known.origin is None or not _is_file(known.origin, path)):
            raise UsageError(
                f"a module {module!r} exists already ({known.origin}); rename the file"
            )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return module


def _is_file(origin: str, path: str) -> bool:
    return os.path.isfile(origin) and os.path.samefile(origin, path)


# ---- Group items by key, keeping order


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of every key; keys and values keep their order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


# ---- Copies between the CPU and a device that do not wait


Pending: TypeAlias = Callable[[], V]
"""A result that may not be there yet: calling it waits for it."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied from pinned memory if it is on the CPU."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def write_to(place: Tensor, values: Tensor) -> None:
    """Copy values into a tensor in place, on whichever device it is."""
    if place.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    place.copy_(values, non_blocking=True)


def to_host(values: Tensor) -> Pending[Tensor]:
    """Start a copy to the CPU of the values at this point of the current stream."""
    if not values.is_cuda:
        return lambda: values
    import torch

    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    found.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return found

    return wait
