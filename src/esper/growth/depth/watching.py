"""Watching blocks in one forward pass: what each is called with, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from esper.growth.depth.sleeping import Output, Source


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


def learn_output(calls: list[Call]) -> Output | str:
    """Return what the blocks of a run return while they sleep, or why that cannot be said."""
    outputs = [_output_of(call, after) for call, after in pairwise(calls)]
    if any(isinstance(output, str) for output in outputs):
        return next(output for output in outputs if isinstance(output, str))
    if any(output != outputs[0] for output in outputs):
        return "its blocks return different things"
    output = outputs[0]
    assert isinstance(output, Output)
    for call in calls[1:]:
        if len(call.parts) != len(output.parts):
            return "its blocks return different things"
        for source, part in zip(output.parts, call.parts, strict=True):
            given = source.read(call.args, call.kwargs)
            if isinstance(part, Tensor) and getattr(given, "shape", None) != part.shape:
                return "its blocks change the shape of what they are given"
    return output


def _output_of(call: Call, after: Call) -> Output | str:
    """Learn from a call, and from the call that follows, which input stands for which output."""
    parts = []
    for part in call.parts:
        # What the next block takes as its hidden state, this one takes by the same name.
        source = None if is_plain(part) else after.source_of(part) or call.source_of(part)
        if source is None and isinstance(part, Tensor):
            return (
                "its blocks return a tensor that the next one does not take; asleep they have none"
            )
        if source is None and not is_plain(part):
            return f"its blocks return a {type(part).__name__}; let them return tensors or a tuple"
        parts.append(source or Source(value=part))
    form = type(call.output) if type(call.output) in (tuple, list) else None
    return Output(tuple(parts), form)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or nothing, or made of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
