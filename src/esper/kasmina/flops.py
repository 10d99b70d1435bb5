"""Counts the floating-point operations of a module's forward pass, in all and by submodule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import flop_counter as of_torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from esper.kasmina.slots.arguments import example_inputs
from esper.kasmina.slots.probe import call_arguments, evaluating, tensors_in
from esper.leyline.errors import warn
from esper.utils.randomness import drawing

# ---- Floating-point operations of single PyTorch operators, by formula


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


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows of one matrix, each with the matrix of its group."""
    groups = a.shape[0] if a.dim() > b.dim() else 1
    return _product(a, b) // groups


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Every matrix of a recurrent layer is applied once at every step of every sample."""
    # The data of a packed sequence has one axis for both.
    steps = math.prod(x.shape[:-1])
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


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


def _fourier(x: Tensor, dim: Sequence[int], *_: Any, out_val: Tensor) -> int:
    """5 n log2 n for n points, the usual figure, and half of it where one side is real."""
    real = next((tensor for tensor in (x, out_val) if not tensor.is_complex()), None)
    full = x if real is None else real
    points = math.prod(full.shape[axis] for axis in dim)
    operations = 5 * full.numel() * math.log2(points) if points > 1 else 0.0
    return round(operations if real is None else operations / 2)


_OWN: Mapping[Any, Formula] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm), _product),
    **dict.fromkeys(
        (
            *(aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv),
            *(aten.addmm_, aten.baddbmm_, aten.addbmm_, aten.addmv_),
            *(aten._addmm_activation, aten._sparse_addmm),
        ),
        lambda added, a, b, *_, **__: _product(a, b),
    ),
    **dict.fromkeys(
        (aten.addr, aten.addr_), lambda added, a, b, *_, **__: 2 * a.numel() * b.numel()
    ),
    aten._grouped_mm: _grouped_product,
    aten.mkldnn_linear: lambda x, weight, *_, **__: 2 * x.numel() * weight.shape[0],
    aten.conv_tbc: lambda x, weight, *_, out_val: 2 * math.prod(out_val.shape[:2]) * weight.numel(),
    aten.mkldnn_rnn_layer: lambda x, w0, w1, *_, **__: _recurrent(x, (w0, w1)),
    **dict.fromkeys(
        (aten._cudnn_rnn, aten.miopen_rnn), lambda x, weights, *_, **__: _recurrent(x, weights)
    ),
    aten._lstm_mps: lambda x, hidden, weights, *_, **__: _recurrent(x, weights),
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
    **dict.fromkeys(
        (aten._cdist_forward, aten._euclidean_dist),
        lambda x, y, *_, **__: 2 * x.numel() * y.shape[-2],
    ),
    aten._pdist_forward: lambda x, *_, **__: x.shape[0] * (x.shape[0] - 1) * x.shape[1],
    **dict.fromkeys((aten._fft_c2c, aten._fft_r2c, aten._fft_c2r), _fourier),
    **dict.fromkeys(
        (
            # These follow the products of a cell, or lay out weights before them.
            *(aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell),
            aten._cudnn_rnn_flatten_weight,
            *(aten.linalg_vector_norm, aten.linalg_cross, aten._linalg_check_errors),
        ),
        lambda *_, **__: 0,
    ),
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


PASSES_OF_TRAINING = 3
"""A step of training costs about three forward passes: one forward, two backward."""

HOW_TO_COUNT = "unless torch.utils.flop_counter.register_flop_formula gives them a formula"

_WHOLE = ""
"""Name of the counted module itself, as in `named_modules`."""


@dataclass(slots=True)
class FlopCount:
    """Operations of one forward pass; a multiplication with its addition counts as two."""

    by_module: Counter[str] = field(default_factory=Counter)
    """By name as in `named_modules`, children's work included; "" is the whole module."""
    uncounted: dict[str, str] = field(default_factory=dict)
    """Operators that multiply but have no formula, each with the submodule that called it first."""

    @property
    def total(self) -> int:
        """Operations of the whole pass, without those of `uncounted`."""
        return self.by_module[_WHOLE]

    @property
    def training(self) -> int:
        """Operations of a step of training on the same batch: forward and backward."""
        return PASSES_OF_TRAINING * self.total

    def describe_uncounted(self) -> str:
        """Return the uncounted operators and where they ran, for messages."""
        return ", ".join(
            f"{name} in {path!r}" if path else name for name, path in self.uncounted.items()
        )


def count_flops(
    module: nn.Module, example: Any, kwargs: Mapping[str, Any] | None = None
) -> FlopCount:
    """Return the operations of one forward pass of a module, counted by formula.

    The module is called once, in evaluation mode and without gradients. Its mode, its buffers, its
    gradients and the state of random numbers stay as they are, and the count is the same whether it
    trains or evaluates. Work done for a submodule by its parent (`F.linear(x, child.weight)`)
    counts as the parent's.

    Args:
        module: any module.
        example: what it is called with: a tensor, a tuple of arguments or a dict of them.
        kwargs: further arguments by name.

    Returns:
        The count for this batch: `total`, `training` (three times as much), `by_module`, and
        `uncounted`, which a warning names too.
    """
    count = forward_flops(module, example, kwargs)
    if count.uncounted:
        warn(
            f"the operations of {count.describe_uncounted()} cannot be counted; the count is "
            f"without them, {HOW_TO_COUNT}"
        )
    return count


def forward_flops(
    module: nn.Module, example: Any, kwargs: Mapping[str, Any] | None = None
) -> FlopCount:
    """Do what `count_flops` does, without the warning about uncounted operators."""
    args, named = call_arguments(example_inputs(module, example))
    named |= dict(kwargs or {})
    with counting(module) as count, _untouched(module, (args, named)), torch.no_grad():
        module(*args, **named)
    return count


@contextmanager
def counting(module: nn.Module) -> Iterator[FlopCount]:
    """Count the operations of a module's calls within the block.

    PyTorch's fused attention is off meanwhile: it packs padded batches, which cannot be counted.
    """
    paths = _ModulePaths(module)
    mode = _CountingMode(paths)
    # Compiled code would hide what it does.
    with _without_fused_attention(), torch.compiler.set_stance("force_eager"), paths, mode:
        yield mode.count


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class _ModulePaths:
    """Tracks which submodules are being called, from outermost to innermost."""

    def __init__(self, module: nn.Module) -> None:
        # Scripted modules take no hooks; their work counts as their parent's.
        self._modules = {
            name: one
            for name, one in module.named_modules()
            if not isinstance(one, torch.jit.ScriptModule)
        }
        self._hooks: list[RemovableHandle] = []
        self.active: list[str] = []

    def __enter__(self) -> _ModulePaths:
        for name, module in self._modules.items():
            enter, leave = partial(self._enter, name), self._leave
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self.active.append(name)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.active.pop()


class _CountingMode(TorchDispatchMode):
    """Applies a formula to every operator that is called."""

    supports_higher_order_operators = True

    def __init__(self, paths: _ModulePaths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = FlopCount()
        self._paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._control_flow(func, args, kwargs)
        operator = func.overloadpacket
        # Nested tensors have no sizes to take an operator apart by, nor to put into a formula.
        is_nested = any(isinstance(arg, Tensor) and arg.is_nested for arg in args)
        if formula_of(operator) is None and not is_nested:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self._add(operator, args, kwargs, out)
        return out

    def _control_flow(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a loop or a branch, and count what its body does as often as it runs."""

        def counted(body: Any) -> Any:
            def run(*inputs: Any, **named: Any) -> Any:
                with self:
                    return body(*inputs, **named)

            return run

        if formula_of(func) is None:
            return func(*(counted(arg) if callable(arg) else arg for arg in args), **kwargs)
        out = func(*args, **kwargs)
        self._add(func, args, kwargs, out)
        return out

    def _add(self, operator: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        active = self._paths.active
        formula = formula_of(operator)
        try:
            flops = None if formula is None else formula(*args, **kwargs, out_val=out)
        except Exception:
            # A kind of tensor that the formula was not written for.
            flops = None
        if flops is not None:
            self.count.by_module.update(dict.fromkeys({_WHOLE, *active}, int(flops)))
        elif formula is not None or may_multiply(operator):
            name = "::".join(str(operator).split(".", 1))
            self.count.uncounted.setdefault(name, active[-1] if active else _WHOLE)


@contextmanager
def _untouched(module: nn.Module, batch: Any) -> Iterator[None]:
    """Evaluate within the block; modes, buffers and random numbers are put back."""
    device = next((tensor.device for tensor in tensors_in(batch)), torch.device("cpu"))
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        # Inference tensors cannot be changed here, and do not say how often they were.
        if buffer is not None and not buffer.is_inference()
    ]
    versions = [buffer._version for _, _, buffer, _ in buffers]
    try:
        with evaluating(module), drawing(device, "count"):
            yield
    finally:
        for (owner, name, buffer, saved), version in zip(buffers, versions, strict=True):
            owner._buffers[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(saved)
