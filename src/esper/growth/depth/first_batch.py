"""The hook that sees the first batch of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from esper.growth.depth.stacks import block_lists

OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class FirstBatch:
    """Forward pre-hook that passes on the arguments of a call, until it is removed.

    Copies of a model copy its hooks; a copy of this one does nothing.
    """

    def __init__(self, on_call: OnCall | None = None) -> None:
        """Call this method, through a weak reference to its object."""
        self._on_call = None if on_call is None else weakref.WeakMethod(on_call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return FirstBatch, ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass on a call of the module."""
        on_call = None if self._on_call is None else self._on_call()
        if on_call is not None:
            on_call(module, args, kwargs)

    def hook(self, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of these modules."""
        for module in modules:
            # It runs before FSDP gathers parameters for the call.
            module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Remove all hooks of this kind from a model and its submodules."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, FirstBatch):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def wait_for_batch(
    wrappers: Sequence[nn.Module], chosen: str | Sequence[str], on_call: OnCall
) -> None:
    """Pass on calls of a model and of the modules around its blocks: trainers may call only a part.

    Args:
        wrappers: the wrappers around the network, outermost first, and the network.
        chosen: names of stacks, or 'auto'.
        on_call: takes the module that is called, its arguments and keyword arguments.
    """
    network = wrappers[-1]
    named = [chosen] if isinstance(chosen, str) else chosen
    lists = [name for name, _ in block_lists(network)] if named == ["auto"] else named
    modules = dict(network.named_modules())
    # A wrong name is refused on the first batch, with a list of the right ones.
    watched = [modules[name] for name in ancestors(lists) if name in modules]
    unhook(wrappers[0])
    FirstBatch(on_call).hook([*wrappers[:-1], *watched])


def ancestors(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of all modules around these, outermost first; '' is the model."""
    paths = {""} | {
        name.rsplit(".", count)[0] for name in names for count in range(1, name.count(".") + 1)
    }
    yield from sorted(paths, key=lambda path: (path.count("."), path))
