"""Counting the floating-point operations of any module's forward pass, whole and by submodule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from esper.kasmina.flop_formulas import formula_of, may_multiply
from esper.kasmina.probe import call_arguments, evaluating, tensors_in
from esper.leyline.errors import warn
from esper.leyline.randomness import drawing

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
        """Return the operators that were not counted, and where they ran, in a few words."""
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
    """Return what `count_flops` does, and leave it to the caller to name what is uncounted."""
    args, named = call_arguments(example)
    named |= dict(kwargs or {})
    with counting(module) as count, _untouched(module, (args, named)), torch.no_grad():
        module(*args, **named)
    return count


@contextmanager
def counting(module: nn.Module) -> Iterator[FlopCount]:
    """Count the operations of a module's calls within the block.

    PyTorch's fused paths are off meanwhile: they are the same work, and pack padded batches so that
    it cannot be told how much.
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
    """Knows which submodules are being called, from outermost to innermost."""

    def __init__(self, module: nn.Module) -> None:
        # Those that are scripted take no hooks; what they do is their parent's.
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
