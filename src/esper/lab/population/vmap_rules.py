"""Checks whether modules run under `vmap`, and faster rules for some: norms, pools, and others.

Under `vmap`, GroupNorm takes several passes, and norms and pools copy every activation to move rows
to the front. Both treat all samples in the same way. So here they leave `vmap` and work on rows and
samples as one batch, in any memory order; autograd works as usual. A ReLU or a residual sum after a
norm is fused with it. On a CUDA device all of these, and plain convolutions, are kernels of this
package. Attention of hosts leaves `vmap` too: on a CPU, `vmap` would loop over the rows.

Hosts and blueprints can be any module: `host_problem` and `seed_problem` run it once, and return in
one sentence why it cannot be stacked.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.conv import ConvBranch
from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts.cnn import StandardisedConv
from esper.kasmina.hosts.transformer import MultiHeadAttention
from esper.kasmina.seedbed import draw_probe, draw_seed
from esper.lab.population.engine import SlotSpec
from esper.leyline.actions import apply_function
from esper.leyline.errors import reason_of
from esper.leyline.slots import Symmetry, Topology

_POOLS = (nn.MaxPool2d, nn.AvgPool2d)
_CONVOLUTIONS = (nn.Conv2d, StandardisedConv)

_BATCH_OF_IMAGES = 4
"""Number of dimensions of activations for the image kernels."""

SampleWise = Callable[[Tensor], Tensor]


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels of this package can process a tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and _can_run_kernels()


@lru_cache(maxsize=1)
def _can_run_kernels() -> bool:
    """Whether the device supports BF16 and Triton is installed."""
    return torch.cuda.get_device_capability() >= (8, 0) and find_spec("triton") is not None


class LeavesVmap(torch.autograd.Function):
    """Base of functions that work on all rows at once in `vmap`, with ordinary autograd."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing for the backward pass."""


class _StackedGroupNorm(LeavesVmap):
    """Leaves `vmap` for a normalisation, with a following ReLU and sum."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> Tensor:
        normed = F.group_norm(x, groups, weight, bias, eps)
        normed = torch.relu(normed) if relu else normed
        return normed if residual is None else normed + residual

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, int]:
        rows = info.batch_size
        gain, shift = _per_row(weight, in_dims[1], rows), _per_row(bias, in_dims[2], rows)
        if has_kernels(x):
            from esper.lab.population.kernels.normalisation import LARGEST_GROUP, normalise

            x = _first(x, in_dims[0], rows)
            if x[0, 0].numel() // groups <= LARGEST_GROUP:
                other = None if residual is None else _first(residual, in_dims[3], rows)
                other = None if other is None else other.movedim(2, -1)
                out = normalise(
                    x.movedim(2, -1), gain, shift, groups, eps, relu=relu, residual=other
                )
                return out.movedim(-1, 2), 0
            in_dims = (0, *in_dims[1:])
        x, dim = rows_leading(x, in_dims[0], rows)
        wide = [1] * x.dim()
        wide[dim], wide[2] = rows, x.shape[2]
        normed = F.group_norm(x.flatten(0, 1), groups, eps=eps).reshape(x.shape)
        normed = torch.addcmul(shift.reshape(wide), normed, gain.reshape(wide))
        normed = torch.relu(normed) if relu else normed
        if residual is not None:
            where = in_dims[3]
            aligned = residual.unsqueeze(dim) if where is None else residual.movedim(where, dim)
            normed = normed + aligned
        return normed, dim


class _StackedSampleWise(LeavesVmap):
    """Leaves `vmap` for a function without parameters that treats samples independently."""

    @staticmethod
    def forward(x: Tensor, function: SampleWise) -> Tensor:
        return function(x)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, function: SampleWise
    ) -> tuple[Tensor, int]:
        x, dim = rows_leading(x, in_dims[0], info.batch_size)
        return function(x.flatten(0, 1)).unflatten(0, x.shape[:2]), dim


class _StackedAttention(LeavesVmap):
    """Leaves `vmap` for attention, which mixes the positions of one sample alone."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
    ) -> tuple[Tensor, int]:
        parts = zip((query, key, value), in_dims[:3], strict=True)
        query, key, value = (_first(x, dim, info.batch_size) for x, dim in parts)
        out = F.scaled_dot_product_attention(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), is_causal=causal
        )
        return out.unflatten(0, query.shape[:2]), 0


class _KernelPool(LeavesVmap):
    """Leaves `vmap` for a 2x2 max pool by a kernel."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int]:
        from esper.lab.population.kernels.images import pool_max

        x = _first(x, in_dims[0], info.batch_size)
        return pool_max(x.movedim(2, -1)).movedim(-1, 2), 0


class _KernelConvolution(LeavesVmap):
    """Leaves `vmap` for a convolution by a kernel."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
        return F.conv2d(x, weight, padding=padding, groups=groups)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        padding: int,
        groups: int,
    ) -> tuple[Tensor, int]:
        from esper.lab.population.kernels.convolution import convolve
        from esper.lab.population.kernels.images import filter_depthwise

        x = _first(x, in_dims[0], info.batch_size).movedim(2, -1)
        weight = _first(weight, in_dims[1], info.batch_size)
        out = convolve(x, weight, padding) if groups == 1 else filter_depthwise(x, weight)
        return out.movedim(-1, 2), 0


def install_vmap_rules(module: nn.Module) -> nn.Module:
    """Make norms, pools, convolutions and attention in a module use these rules under `vmap`.

    This concerns PyTorch's own classes and those of this package: other subclasses may behave
    differently.
    """
    for part in module.modules():
        if type(part) is nn.GroupNorm and part.affine:
            part.forward = partial(_normalise, part)  # type: ignore[method-assign]
        elif type(part) is nn.MaxPool2d and _is_plain_pool(part):
            part.forward = partial(_pool, part.forward)  # type: ignore[method-assign]
        elif type(part) in _POOLS and not getattr(part, "return_indices", False):
            part.forward = partial(_apply_sample_wise, part.forward)
        elif isinstance(part, nn.Conv2d) and _is_plain_convolution(part):
            part.forward = partial(_convolve, part, part.forward)  # type: ignore[method-assign]
        elif type(part) is nn.Sequential:
            part.forward = partial(_run_sequence, part)  # type: ignore[method-assign]
        elif isinstance(part, MultiHeadAttention) and part.dropout == 0.0:
            part.attend = _attend  # type: ignore[method-assign]
        elif isinstance(part, ConvBranch) and type(part).forward is ConvBranch.forward:
            part.forward = partial(_run_branch, part)  # type: ignore[method-assign]
    return module


def rows_leading(x: Tensor, dim: int | None, rows: int) -> tuple[Tensor, int]:
    """Return the activation with rows and samples as first dimensions, and the rows' dimension."""
    if dim is None:
        return x.expand(rows, *x.shape), 0
    return (x, dim) if dim <= 1 else (x.movedim(dim, 0), 0)


def _first(x: Tensor, dim: int | None, rows: int) -> Tensor:
    """Return a tensor with rows as its first dimension."""
    return x.expand(rows, *x.shape) if dim is None else x.movedim(dim, 0)


def _per_row(value: Tensor, dim: int | None, rows: int) -> Tensor:
    """Return one vector per row."""
    return (value if dim is None else value.movedim(dim, 0)).expand(rows, value.shape[-1])


def _is_plain_pool(pool: nn.MaxPool2d) -> bool:
    square = pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2))
    moved = pool.padding not in (0, (0, 0)) or pool.dilation not in (1, (1, 1))
    return square and not (moved or pool.ceil_mode or pool.return_indices)


def _is_plain_convolution(conv: nn.Conv2d) -> bool:
    """Whether the kernels support a convolution: square, stride 1, dense or depthwise."""
    if type(conv) not in _CONVOLUTIONS:
        return False
    side, padding = conv.kernel_size[0], conv.padding
    if conv.kernel_size != (side, side) or conv.stride != (1, 1) or conv.dilation != (1, 1):
        return False
    if conv.padding_mode != "zeros" or isinstance(padding, str) or padding[0] != padding[1]:
        return False
    if conv.groups == 1:
        return padding[0] < side
    same_size = side % 2 == 1 and padding[0] == side // 2
    return same_size and conv.groups == conv.in_channels == conv.out_channels


def _normalise(
    norm: nn.GroupNorm, x: Tensor, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    return apply_function(
        _StackedGroupNorm, x, norm.weight, norm.bias, residual, norm.num_groups, norm.eps, relu
    )


def _pool(plain: SampleWise, x: Tensor) -> Tensor:
    if not has_kernels(x) or x.dim() != _BATCH_OF_IMAGES:
        return _apply_sample_wise(plain, x)
    return apply_function(_KernelPool, x)


def _apply_sample_wise(function: SampleWise, x: Tensor) -> Tensor:
    return apply_function(_StackedSampleWise, x, function)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return apply_function(_StackedAttention, query, key, value, causal)


def _convolve(conv: nn.Conv2d, plain: SampleWise, x: Tensor) -> Tensor:
    if not has_kernels(x) or x.dim() != _BATCH_OF_IMAGES:
        return plain(x)
    filters = conv.filters() if isinstance(conv, StandardisedConv) else conv.weight
    out = apply_function(_KernelConvolution, x, filters, int(conv.padding[0]), conv.groups)
    return out if conv.bias is None else out + conv.bias[:, None, None]


def _run_sequence(sequence: nn.Sequential, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Run modules in order, a norm together with a following ReLU and sum."""
    parts = list(sequence)
    at = 0
    while at < len(parts):
        part, following = parts[at], parts[at + 1 : at + 2]
        if type(part) is nn.GroupNorm and part.affine and not _is_watched(part):
            relu = bool(following) and type(following[0]) is nn.ReLU
            relu = relu and not _is_watched(following[0])
            at += 2 if relu else 1
            last = residual if at == len(parts) else None
            x = _normalise(part, x, relu, last)
            residual = None if last is not None else residual
        else:
            x = part(x)
            at += 1
    return x if residual is None else x + residual


def _run_branch(branch: ConvBranch, x: Tensor) -> Tensor:
    """Return the activation plus the branch; the last kernel computes the sum."""
    if _is_watched(branch.branch):
        out: Tensor = x + branch.branch(x)
        return out
    return _run_sequence(branch.branch, x, x)


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks, so that it must be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


_LONGEST_REASON = 200

_NO_RULE_YET = (
    r"There is a performance drop because we have not yet implemented the batching rule for "
    r"aten::_scaled_dot_product"
)


@contextmanager
def stacked_attention() -> Iterator[None]:
    """Within the block, ignore PyTorch's warning about attention under `vmap`.

    Without a `vmap` rule for attention PyTorch loops over the networks: slower, but correct. The
    user cannot change this.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_RULE_YET, UserWarning)
        yield


def host_problem(
    hosts: Sequence[nn.Module], example: Tensor, *, in_bf16: bool = False
) -> str | None:
    """Return why hosts of one architecture cannot be stacked, or None; two hosts suffice."""
    return _problem(hosts, example, in_bf16, keeps_shape=False)


def seed_problem(blueprint: Blueprint, slot: SlotSpec, *, in_bf16: bool = False) -> str | None:
    """Return why seeds of a blueprint cannot be stacked in a slot, or None."""
    return _seed_problem(
        blueprint, slot.channels, slot.topology, slot.symmetry, slot.shape, in_bf16
    )


@lru_cache(maxsize=1024)
def _seed_problem(
    blueprint: Blueprint,
    channels: int,
    topology: Topology,
    symmetry: Symmetry,
    shape: tuple[int, ...],
    in_bf16: bool,
) -> str | None:
    # A seed may say so itself, by the attribute that `esper.testing.check_blueprint` knows.
    reason = getattr(blueprint.module, "no_vmap", "")
    if reason:
        return str(reason)
    seeds = [
        draw_seed(blueprint, channels, topology, symmetry, (0, 0, number)) for number in range(2)
    ]
    return _problem(seeds, draw_probe(shape, (0, 0, 0)), in_bf16, keeps_shape=True)


def _problem(
    modules: Sequence[nn.Module], x: Tensor, in_bf16: bool, *, keeps_shape: bool
) -> str | None:
    if in_bf16:
        modules = [copy.deepcopy(module).to(torch.bfloat16) for module in modules]
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
    first = modules[0]
    for name, module in first.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name or 'it'!r} is a BatchNorm, whose statistics change in place"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return (
                f"{name or 'it'!r} draws random numbers, which must come from each row's own stream"
            )
    buffers = [{name: b.clone() for name, b in each.named_buffers()} for each in modules]
    for name, buffer in buffers[0].items():
        if not all(torch.equal(buffer, other[name]) for other in buffers[1:]):
            return f"its buffer {name!r} differs between rows, which share all buffers"
    problem = _try_out(modules, x, keeps_shape=keeps_shape)
    if problem is not None:
        return problem
    for name, buffer in first.named_buffers():
        if not torch.equal(buffer, buffers[0][name]):
            return f"its buffer {name!r} changes in a forward pass, and rows share all buffers"
    return None


def _try_out(modules: Sequence[nn.Module], x: Tensor, *, keeps_shape: bool) -> str | None:
    """Run the modules as one stack, in training mode, each on its own inputs."""
    first = modules[0].train()
    parameters = {
        name: torch.stack([each.get_parameter(name).detach() for each in modules])
        for name, _ in first.named_parameters()
    }
    inputs = torch.stack([x] * len(modules))

    def one(own: dict[str, Tensor], own_x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(first, own, (own_x,))
        return result

    try:
        with torch.no_grad(), stacked_attention():
            # A module without parameters needs no stacking: it runs on all rows as one batch.
            out = torch.func.vmap(one)(parameters, inputs) if parameters else first(x)[None]
    except Exception as error:  # a user's own module may raise anything
        reason = reason_of(error)
        return f"{type(error).__name__}: {reason}"[:_LONGEST_REASON]
    if keeps_shape and out.shape[1:] != x.shape:
        return f"it turns {list(x.shape)} into {list(out.shape[1:])}"
    return None
