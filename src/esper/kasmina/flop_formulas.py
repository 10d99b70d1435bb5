"""Floating-point operations of single PyTorch operators, by formula.

A multiplication with its addition counts as two operations. What works element by element
(activations, normalisation, biases, softmax) counts as none, as is usual. PyTorch has formulas for
its common operators; here are those it lacks: recurrent kernels, fused attention, attention on the
CPU, products with vectors and sparse matrices, bilinear maps, embedding bags, distances, FFTs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter as of_torch

aten = torch.ops.aten

Formula = Callable[..., int]
"""Takes an operator's arguments, and its result as `out_val`."""


def _stored(matrix: Tensor) -> int:
    """Return how many numbers a matrix stores; a sparse one stores fewer than it has entries."""
    if matrix.layout == torch.strided:
        return matrix.numel()
    values = matrix._values() if matrix.layout == torch.sparse_coo else matrix.values()
    return values.numel()


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Product of matrices, of batches of them, or of vectors."""
    if b.layout != torch.strided:
        return 2 * _stored(b) * (a.shape[-2] if a.dim() > 1 else 1)
    return 2 * _stored(a) * (b.shape[-1] if b.dim() > 1 else 1)


def _added_product(_added: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return _product(a, b)


def _outer(_added: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.numel()


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows of one matrix, each with the matrix of its group."""
    groups = a.shape[0] if a.dim() > b.dim() else 1
    return _product(a, b) // groups


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _conv_tbc(x: Tensor, weight: Tensor, *_: Any, out_val: Tensor) -> int:
    return 2 * out_val.shape[0] * out_val.shape[1] * weight.numel()


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Every matrix of a recurrent layer is applied once at every step of every sample."""
    # The data of a packed sequence has one axis for both.
    steps = math.prod(x.shape[:-1])
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_mkldnn(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> int:
    return _recurrent(x, (w0, w1))


def _recurrent_cudnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _recurrent(x, weights)


def _recurrent_mps(x: Tensor, _hidden: Any, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _recurrent(x, weights)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Every query with every key, and every weight with every value; a mask saves nothing."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _multi_head_attention(
    q: Tensor, k: Tensor, v: Tensor, width: int, _heads: int, *_: Any, **__: Any
) -> int:
    """Projections of queries, keys, values and results, and attention between them."""
    batch, tokens, width = q.shape
    projections = 2 * (2 * q.numel() + k.numel() + v.numel()) * width
    return projections + 4 * batch * tokens * k.shape[1] * width


def _encoder_layer(x: Tensor, *args: Any, out_val: Any = None, **given: Any) -> int:
    """PyTorch's fused Transformer encoder layer: self-attention, then two linear maps."""
    names = [argument.name for argument in _ENCODER_LAYER_ARGUMENTS]
    given |= dict(zip(names[1:], args, strict=False))
    hidden: int = given["ffn_weight_1"].shape[0]
    return _multi_head_attention(x, x, x, x.shape[-1], 1) + 4 * x.numel() * hidden


_ENCODER_LAYER_ARGUMENTS = aten._transformer_encoder_layer_fwd.default._schema.arguments


def _bilinear(x: Tensor, weight: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """First input with the weight [out, in1, in2], then the result with the second input."""
    batch = math.prod(x.shape[:-1])
    return 2 * batch * (weight.numel() + weight.shape[0] * y.shape[-1])


_MAXIMUM = 2
"""Mode of an embedding bag in which numbers are compared, not added."""


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    _offsets: Any,
    _scale: Any = False,
    mode: int = 0,
    *_: Any,
    **__: Any,
) -> int:
    """A sparse matrix of weights (ones, shares or the caller's own) times the table."""
    return 0 if mode == _MAXIMUM else 2 * indices.numel() * weight.shape[1]


def _distances(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * y.shape[-2]


def _own_distances(x: Tensor, *_: Any, **__: Any) -> int:
    return x.shape[0] * (x.shape[0] - 1) * x.shape[1]


def _fourier(x: Tensor, dim: Sequence[int], *_: Any, out_val: Tensor) -> int:
    """5 n log2 n for n points, the usual figure, and half of it where one side is real."""
    real = next((tensor for tensor in (x, out_val) if not tensor.is_complex()), None)
    full = x if real is None else real
    points = math.prod(full.shape[axis] for axis in dim)
    operations = 5 * full.numel() * math.log2(points) if points > 1 else 0.0
    return round(operations if real is None else operations / 2)


def _nothing(*_: Any, **__: Any) -> int:
    return 0


_OWN: Mapping[Any, Formula] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm), _product),
    **dict.fromkeys(
        (
            *(aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv),
            *(aten.addmm_, aten.baddbmm_, aten.addbmm_, aten.addmv_),
            *(aten._addmm_activation, aten._sparse_addmm),
        ),
        _added_product,
    ),
    **dict.fromkeys((aten.addr, aten.addr_), _outer),
    aten._grouped_mm: _grouped_product,
    aten.mkldnn_linear: _linear,
    aten.conv_tbc: _conv_tbc,
    aten.mkldnn_rnn_layer: _recurrent_mkldnn,
    aten._cudnn_rnn: _recurrent_cudnn,
    aten.miopen_rnn: _recurrent_cudnn,
    aten._lstm_mps: _recurrent_mps,
    # What follows the products of a cell, and what lays out weights before them.
    aten._thnn_fused_lstm_cell: _nothing,
    aten._thnn_fused_gru_cell: _nothing,
    aten._cudnn_rnn_flatten_weight: _nothing,
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_fused_attention_overrideable,
            aten._scaled_dot_product_attention_math_for_mps,
        ),
        _attention,
    ),
    aten._native_multi_head_attention: _multi_head_attention,
    aten._transformer_encoder_layer_fwd: _encoder_layer,
    aten._trilinear: _bilinear,
    aten._embedding_bag: _embedding_bag,
    aten._embedding_bag_forward_only: _embedding_bag,
    aten._cdist_forward: _distances,
    aten._euclidean_dist: _distances,
    aten._pdist_forward: _own_distances,
    **dict.fromkeys((aten._fft_c2c, aten._fft_r2c, aten._fft_c2r), _fourier),
    aten.linalg_vector_norm: _nothing,
    aten.linalg_cross: _nothing,
    aten._linalg_check_errors: _nothing,
}


def formula_of(operator: Any) -> Formula | None:
    """Return the formula of an operator: ours, PyTorch's, or one that somebody registered."""
    return _OWN.get(operator) or of_torch.flop_registry.get(operator)


_LIGHT_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "profiler", "debugprims", "rngprims", "inductor", "streams"),
        *("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "symm_mem"),
    )
)
"""Operators of PyTorch's own, and those that only send tensors around."""

_HEAVY_WORDS = frozenset(
    (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "matmul", "gemm"),
        *("hspmm", "smm", "sspaddmm", "linear", "conv", "conv1d", "conv2d", "conv3d"),
        *(
            "convolution",
            "depthwise2d",
            "depthwise3d",
            "rnn",
            "lstm",
            "gru",
            "attention",
            "transformer",
            "linalg",
        ),
        *("cholesky", "solve", "triangular", "qr", "geqrf", "orgqr", "ormqr", "svd", "eig"),
        *("lstsq", "lu", "spsolve", "fft", "cdist", "pdist", "4bit", "int4pack", "int8pack"),
    )
)
"""Words in the names of PyTorch's operators that do more than touch every element."""


@lru_cache(maxsize=4096)
def may_multiply(operator: Any) -> bool:
    """Return whether an operator without a formula may do work that should have been counted."""
    namespace, _, name = str(operator).partition(".")
    if namespace not in _LIGHT_NAMESPACES:
        overloads = [getattr(operator, one) for one in operator.overloads()]
        return not all(torch.Tag.pointwise in one.tags for one in overloads)
    return namespace == "aten" and not _HEAVY_WORDS.isdisjoint(name.split("_"))
