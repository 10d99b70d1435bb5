"""Records the calls of blocks in one forward pass: their arguments and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.slots.probe import evaluating, tensors_in


@dataclass(frozen=True, slots=True)
class Source:
    """Where a call has an argument, by position or name; or a fixed value."""

    index: int | None = None
    """Number of the positional argument, None where it has none."""
    name: str | None = None
    """Name of the argument, None where it has none."""
    value: Any = None
    """The fixed value, where the call has no such argument."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument from those of a call, or the value."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.index is not None and self.index < len(args):
            return args[self.index]
        return self.value


@dataclass(slots=True)
class Call:
    """One call of a block. It keeps its tensors alive, so that their ids stay unique."""

    inputs: list[tuple[Source, Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def source_of(self, value: Any) -> Source | None:
        """Return the argument that is this very object."""
        return next((source for source, one in self.inputs if one is value), None)

    @property
    def parts(self) -> list[Any]:
        """The outputs of the block as a list."""
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

            # Around all other hooks, such as those by which FSDP casts and gathers.
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
    """Return the arguments of a call, each with its place in another call."""
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
    """Return whether a value is None, a number or a text, or a list of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def is_shareable(value: Any) -> bool:
    """Return whether a block and its copy can share a value; they cannot share a cache."""
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


# ---- Whether a block has a residual path: its input passes when its matrices are zero


def has_residual_path(block: nn.Module, call: Call, hidden: Sequence[Source]) -> bool:
    """Return whether a block's output depends on its input when its matrices are zero.

    The block is run twice, on random hidden states; it is left as it was.

    Args:
        block: the block.
        call: a call of it.
        hidden: the arguments of the call that are hidden states; the others stay as they are.
    """
    with evaluating(block), _zeroed(block):
        one, other = (_run_changed(block, call, hidden) for _ in range(2))
    return any(
        not torch.equal(a, b) for a, b in zip(tensors_in(one), tensors_in(other), strict=True)
    )


def _run_changed(block: nn.Module, call: Call, hidden: Sequence[Source]) -> list[Tensor]:
    """Return a block's outputs for random hidden states, without arguments it passes on."""
    args, kwargs = list(call.args), dict(call.kwargs)
    parameters = inspect.signature(block.forward).parameters
    for source, value in call.inputs:
        if source in hidden and isinstance(value, Tensor):
            value = torch.randn_like(value)
        elif not is_plain(value) and not any(True for _ in tensors_in(value)):
            # An object may remember the first call, such as a cache of keys and values.
            value = getattr(parameters.get(source.name or ""), "default", None)
        if source.name is not None and source.name in kwargs:
            kwargs[source.name] = value
        else:
            assert source.index is not None
            args[source.index] = value
    result = block(*args, **kwargs)
    given = {id(value) for value in (*args, *kwargs.values())}
    parts = result if isinstance(result, tuple | list) else [result]
    return [p for p in parts if isinstance(p, Tensor) and (id(p) not in given or len(parts) == 1)]


@contextmanager
def _zeroed(block: nn.Module) -> Iterator[None]:
    """Set all matrices and kernels of a block to zero, and put them back."""
    matrices = [parameter for parameter in block.parameters() if parameter.dim() > 1]
    kept = [matrix.detach().clone() for matrix in matrices]
    try:
        for matrix in matrices:
            matrix.zero_()
        yield
    finally:
        for matrix, values in zip(matrices, kept, strict=True):
            matrix.copy_(values)
