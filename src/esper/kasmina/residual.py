"""Whether a block has a residual path: what comes through it when its matrices are zero."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.calls import Call, Source, is_plain
from esper.kasmina.probe import evaluating, tensors_in


def has_residual_path(block: nn.Module, call: Call, hidden: Sequence[Source]) -> bool:
    """Return whether anything comes through a block once its matrices are zero.

    The block is run twice, on random hidden states; it is left as it was.

    Args:
        block: what is tried.
        call: a call of it.
        hidden: the arguments of the call that are hidden states; the others stay as they are.
    """
    with evaluating(block), _zeroed(block):
        one, other = (_run_changed(block, call, hidden) for _ in range(2))
    return any(
        not torch.equal(a, b) for a, b in zip(tensors_in(one), tensors_in(other), strict=True)
    )


def _run_changed(block: nn.Module, call: Call, hidden: Sequence[Source]) -> list[Tensor]:
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
