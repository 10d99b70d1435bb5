"""Which software made a result."""

from __future__ import annotations

import platform
from functools import lru_cache

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
