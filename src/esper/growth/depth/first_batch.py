"""The hook by which the first batch of a model is seen, where no example was given.

A module of its own because PyTorch loads its compiler as soon as a function is kept out of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class FirstBatch:
    """Forward pre-hook that tells the arguments of a call, until it is removed.

    Copies of a model copy its hooks: a copy of this one, pickled or not, does nothing.
    """

    def __init__(self, on_call: OnCall | None = None) -> None:
        """Call this method of an object that is not kept alive by it."""
        self._on_call = None if on_call is None else weakref.WeakMethod(on_call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return FirstBatch, ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell a call of the module."""
        on_call = None if self._on_call is None else self._on_call()
        if on_call is not None:
            on_call(module, args, kwargs)

    def hook(self, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of these modules."""
        for module in modules:
            # Before FSDP gathers parameters for the call.
            module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Remove all hooks of this kind from a model and everything within it."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, FirstBatch):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
