"""What made a result and what it took: software, memory, the share of a device in use."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

import numpy
import torch

from esper._version import __version__


@lru_cache(maxsize=1)
def software_versions() -> dict[str, str]:
    """Return the versions a reader needs to reproduce a run."""
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
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except (OSError, ValueError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def gpu_memory_share(device: torch.device) -> float | None:
    """Return the share of a CUDA device's memory that is in use, by whomever."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return 1.0 - free / total
