"""Where tensors are: what the name of a device means on this machine."""

from __future__ import annotations

import torch

from esper.leyline.errors import UsageError


def choose_device(name: str) -> torch.device:
    """Return the named device, or the one 'auto' stands for: a CUDA device where there is one."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name.startswith("cuda") and not has_cuda:
        raise UsageError(
            "this machine has no CUDA device; use --device cpu (in Python: device='cpu')"
        )
    return torch.device(name)
