"""Whether a block has a residual path: what comes through it when its matrices are zero."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.growth.depth.sleeping import Output, Source
from esper.growth.depth.watching import Call, is_plain
from esper.kasmina.probe import evaluating, tensors_in


def without_residual(
    names: list[str],
    children: Mapping[str, nn.Module],
    calls: Mapping[str, list[Call]],
    output: Output,
) -> str | None:
    """Return the first of these blocks through which nothing comes once its matrices are zero."""
    for name in names:
        block, call = children[name], calls[name][0]
        made = [part for part in call.parts if isinstance(part, Tensor)]
        hidden = [
            source
            for source, part in zip(output.parts, call.parts, strict=True)
            if isinstance(part, Tensor) and (call.source_of(part) is None or len(made) == 1)
        ]
        with evaluating(block), _zeroed(block):
            one, other = (_run_changed(block, call, hidden) for _ in range(2))
        changed = [
            not torch.equal(a, b) for a, b in zip(tensors_in(one), tensors_in(other), strict=True)
        ]
        if not any(changed):
            return name
    return None


def _run_changed(block: nn.Module, call: Call, hidden: list[Source]) -> list[Tensor]:
    """Return what a block makes of random hidden states, without what it hands on as it is."""
    args, kwargs = list(call.args), dict(call.kwargs)
    parameters = inspect.signature(block.forward).parameters
    for source, value in call.inputs:
        if source in hidden and isinstance(value, Tensor):
            value = torch.randn_like(value)
        elif not is_plain(value) and not any(True for _ in tensors_in(value)):
            # What is no tensor may remember the first call: a cache of keys and values.
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
