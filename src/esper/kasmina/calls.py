"""Watching blocks in one forward pass: what each is called with, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Source:
    """An argument of a block, wherever a call has it; or a value that stands for one."""

    index: int | None = None
    """Number of the positional argument, None where it has none."""
    name: str | None = None
    """Name of the argument, None where it has none."""
    value: Any = None
    """What it is where it comes from no argument."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument from those of a call, or the value."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.index is not None and self.index < len(args):
            return args[self.index]
        return self.value


@dataclass(slots=True)
class Call:
    """One call of a block. It keeps its tensors alive: the id of a freed one is used again."""

    inputs: list[tuple[Source, Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def source_of(self, value: Any) -> Source | None:
        """Return the argument that is this very object."""
        return next((source for source, one in self.inputs if one is value), None)

    @property
    def parts(self) -> list[Any]:
        """What the block returned, one by one."""
        return list(self.output) if type(self.output) in (tuple, list) else [self.output]


def watch(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, list[Call]]:
    """Return the calls of every block in one forward pass."""
    calls: dict[str, list[Call]] = {name: [] for name in blocks}
    with ExitStack() as hooks:
        for name, block in blocks.items():
            made, names = calls[name], _positional_names(block)

            def before(
                _: Any, args: Any, kwargs: Any, made: Any = made, names: Any = names
            ) -> None:
                made.append(Call(_inputs(args, kwargs, names), args, kwargs))

            def after(_: Any, args: Any, kwargs: Any, output: Any, made: Any = made) -> None:
                made[-1].output = output

            # Outside of all other hooks: what FSDP casts and gathers is between these two.
            first = block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            last = block.register_forward_hook(after, with_kwargs=True)
            hooks.callback(first.remove)
            hooks.callback(last.remove)
        model(*args, **kwargs)
    return calls


def _positional_names(block: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(block.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: list[str]
) -> list[tuple[Source, Any]]:
    """Return the arguments of a call, each with where it can be found in another call."""
    named = [
        (Source(names.index(name) if name in names else None, name), value)
        for name, value in kwargs.items()
    ]
    numbered = [
        (Source(index, names[index] if index < len(names) else None), value)
        for index, value in enumerate(args)
    ]
    return numbered + named


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or nothing, or made of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def is_shareable(value: Any) -> bool:
    """Return whether a block and its copy can be given the same: no cache that both fill."""
    if isinstance(value, Mapping):
        return all(map(is_shareable, value.values()))
    if isinstance(value, tuple | list):
        return all(map(is_shareable, value))
    return isinstance(value, Tensor | torch.dtype | torch.device) or is_plain(value)


def replace_first(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another first one: by position, else by name."""
    if args:
        return (hidden, *args[1:]), dict(kwargs)
    first = next(iter(kwargs))
    return (), {**kwargs, first: hidden}
