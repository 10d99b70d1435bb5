"""The process and its machine: device, memory, garbage collection, versions of software.

PyTorch is loaded where it is needed: whoever reads a run should not wait for it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from esper._version import __version__
from esper.leyline.errors import UsageError

if TYPE_CHECKING:
    import torch


STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1")
    if hasattr(signal, name)
)
"""What asks a run to save and stop: Ctrl-C, `kill`, a closed terminal, a used-up limit of time, and
the warning that batch systems send before they end a job.
"""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_BLOCK = 2**28
_LARGEST_REST = 2**30


def is_debugging() -> bool:
    """Return whether `ESPER_DEBUG=1` is set; it is read anew each time."""
    return os.environ.get("ESPER_DEBUG") == "1"


def is_checking_stages() -> bool:
    """Return whether signals are checked at every step: `ESPER_DEBUG_STAGE=1`, or debugging."""
    return os.environ.get("ESPER_DEBUG_STAGE") == "1" or is_debugging()


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


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what a block does on a CUDA device into a graph, instead of doing it.

    cuBLAS remembers for every stream what memory it works in. What it had before the capture may
    belong to another graph, that runs at the same time or is freed earlier; what it takes
    meanwhile belongs to this one.

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
    """Return the named device, or the one 'auto' stands for: a CUDA device where there is one."""
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
    """Return the versions a reader needs to reproduce a run."""
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
    """Return the memory of this process; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = file.read().split()[1]
    except (OSError, ValueError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Return the memory that a process may still take; None where the system does not say."""
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
    """Return the share of a CUDA device's memory that is in use, by whomever."""
    import torch

    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return 1.0 - free / total


# ---- Modules of users, named as Python names them or by their files


def is_file_name(name: str) -> bool:
    """Return whether a module is named by its file."""
    return name.endswith(".py") or os.sep in name


def find_module(name: str) -> str:
    """Return what a module, or the module in a file, is imported by.

    Its folder (of a module, the current one) goes onto the path, as Python does for a script, so
    that processes which are given its classes find them by name too.

    Raises:
        UsageError: There is no such file, or it cannot be imported by its name.
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


# ---- Putting together what belongs together


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of every key, both in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
