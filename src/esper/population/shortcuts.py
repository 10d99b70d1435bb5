"""Shorter ways for modules that `vmap` handles with extra passes over the activation.

GroupNorm under `vmap` is a normalisation, a product and a sum, and it and the pools copy every
activation to bring rows to the front. Both treat every sample alike, so here they leave `vmap` and
work on rows and samples as one batch, in whatever order they lie; autograd follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_POOLS = (nn.MaxPool2d, nn.AvgPool2d)

SampleWise = Callable[[Tensor], Tensor]


class _StackedGroupNorm(torch.autograd.Function):
    """Leaves `vmap` for one normalisation."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        return F.group_norm(x, groups, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, int]:
        x, dim = _leading(x, in_dims[0], info.batch_size)
        wide = [1] * x.dim()
        wide[dim], wide[2] = info.batch_size, x.shape[2]

        def widened(value: Tensor, where: int | None) -> Tensor:
            rows = value if where is None else value.movedim(where, 0)
            return rows.expand(info.batch_size, x.shape[2]).reshape(wide)

        normed = F.group_norm(x.flatten(0, 1), groups, eps=eps).reshape(x.shape)
        scale, shift = widened(weight, in_dims[1]), widened(bias, in_dims[2])
        return torch.addcmul(shift, normed, scale), dim


class _StackedSampleWise(torch.autograd.Function):
    """Leaves `vmap` for a function that treats every sample alike and has no parameters."""

    @staticmethod
    def forward(x: Tensor, function: SampleWise) -> Tensor:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, function: SampleWise
    ) -> tuple[Tensor, int]:
        x, dim = _leading(x, in_dims[0], info.batch_size)
        return function(x.flatten(0, 1)).unflatten(0, x.shape[:2]), dim


def shorten(module: nn.Module) -> nn.Module:
    """Let every GroupNorm and pool of a module that runs under `vmap` take the short way.

    Only those of PyTorch itself: what a user made of them may do something else.
    """
    for part in module.modules():
        if type(part) is nn.GroupNorm and part.affine:
            part.forward = partial(_normalise, part)  # type: ignore[method-assign]
        elif type(part) in _POOLS and not getattr(part, "return_indices", False):
            part.forward = partial(_apply_sample_wise, part.forward)
    return module


def _leading(x: Tensor, dim: int | None, rows: int) -> tuple[Tensor, int]:
    """Return the activation with rows and samples as its first two dimensions, and the rows'."""
    if dim is None:
        return x.expand(rows, *x.shape), 0
    return (x, dim) if dim <= 1 else (x.movedim(dim, 0), 0)


def _normalise(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    out: Tensor = _StackedGroupNorm.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm.num_groups, norm.eps
    )
    return out


def _apply_sample_wise(function: SampleWise, x: Tensor) -> Tensor:
    out: Tensor = _StackedSampleWise.apply(x, function)  # type: ignore[no-untyped-call]
    return out
