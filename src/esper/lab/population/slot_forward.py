"""Runs the seeds of all rows at a slot of a stacked host, and blends their outputs.

The seeds of one blueprint at one slot are entries of one stack of parameters; `SlotIndex` says
which entry belongs to which row. Entries are ordered by blueprint: the seeds of one blueprint run
as one stacked module on their rows, and all rows are blended together, each by its own stage, style
and amplitude, and put back. The host runs under `vmap`: a forward hook of `StackedEngine` calls
`apply_slot`, which leaves `vmap`, works on all rows at once (`SlotForward.run`), and goes back in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.kasmina.slot import blend_rows
from esper.lab.population.engine import CudaStreams, Job
from esper.lab.population.parameter_stack import ParameterStack
from esper.lab.population.vmap_rules import LeavesVmap, has_kernels, rows_leading
from esper.leyline.actions import apply_function
from esper.leyline.stages import AlphaAlgorithm
from esper.utils.process import to_device, write_to

Integers = NDArray[np.int64]

EMPTY, ISOLATED, BLENDED = 0, 1, 2
"""States of an entry: empty, a seed in isolation, a seed that is blended in."""


@dataclass(frozen=True, slots=True)
class SlotIndexArrays:
    """The values of a `SlotIndex` on the CPU."""

    row_of_entry: Integers
    entry_of_row: Integers
    state: Integers
    algorithm: Integers
    gate_of_entry: Integers
    entry_of_gate: Integers
    row_of_gate: Integers
    alpha: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SlotIndex:
    """Tensors on the device for n entries, k gates and R stacked rows.

    While a captured CUDA graph is in use, entries keep their addresses, and some are unused. Seeds
    are added and removed by changing these values in place.
    """

    row_of_entry: Tensor
    """int64 [n]; any row if the entry is empty."""
    entry_of_row: Tensor
    """int64 [R], -1 for a row without one."""
    state: Tensor
    """int64 [n], EMPTY, ISOLATED or BLENDED."""
    algorithm: Tensor
    """int64 [n], an `AlphaAlgorithm`."""
    gate_of_entry: Tensor
    """int64 [n], -1 for an entry without one."""
    entry_of_gate: Tensor
    """int64 [k], -1 for an unused gate."""
    row_of_gate: Tensor
    """int64 [k]; any row if the gate is unused."""
    alpha: Tensor
    """float64 [n], 1 in isolation."""

    @classmethod
    def from_arrays(cls, arrays: SlotIndexArrays, device: torch.device) -> SlotIndex:
        """Copy the values to a device."""
        return cls(*(to_device(torch.from_numpy(each), device) for each in _values(arrays)))

    def copy_(self, arrays: SlotIndexArrays) -> None:
        """Copy other values in place."""
        for mine, each in zip(_values(self), _values(arrays), strict=True):
            write_to(mine, torch.from_numpy(each))


def _values(numbers: SlotIndex | SlotIndexArrays) -> list[Any]:
    return [getattr(numbers, field.name) for field in fields(SlotIndex)]


@dataclass(frozen=True, slots=True)
class StackedModule:
    """The entries of a slot with the same kind of module, run together."""

    parameters: ParameterStack
    entries: Tensor | None
    """int64 [k], entries of the stack; None for the whole stack in order."""
    module: nn.Module
    """Only its `forward` is used."""
    count: int
    """Number of entries."""

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Run k sets of parameters on k activations, which are along dimension `dim`."""
        leaves = self.parameters.leaves
        if not leaves:
            result: Tensor = self.module(x.flatten(0, 1))
            return result.reshape(x.shape)
        if self.entries is not None:
            leaves = {name: leaf.index_select(0, self.entries) for name, leaf in leaves.items()}
        out: Tensor = vmap(self._one, in_dims=(0, dim), out_dims=dim)(leaves, x)
        return out

    def run_flat(self, x: Tensor) -> Tensor:
        """Run on activations in the memory layout of the kernels."""
        return _flat_rows(self.run(_image(x), 0)).to(x.dtype)

    def _one(self, parameters: dict[str, Tensor], activation: Tensor) -> Tensor:
        result: Tensor = functional_call(self.module, parameters, (activation,))
        return result


@dataclass(frozen=True, slots=True)
class SlotForward:
    """All seeds at one slot: entries ordered by blueprint, blended together."""

    index: SlotIndex
    modules: tuple[StackedModule, ...]
    gates: StackedModule | None
    streams: CudaStreams
    """Streams of the modules, which run in parallel if that is faster."""

    def run(self, h: Tensor, dim: int) -> tuple[Tensor, int]:
        """Return the activations after the slot and the dimension of the rows, 0 or 1.

        Convolutions put rows next to channels, as dimension 1. They stay there, because moving them
        would copy every activation.
        """
        if has_kernels(h):
            return self._run_kernels(h.movedim(dim, 0)), 0
        index = self.index
        here = h.index_select(dim, index.row_of_entry)
        isolated = _along(index.state == ISOLATED, here, dim)
        # The output of an isolated seed or of an unused entry has no effect.
        x = torch.where(_along(index.state == BLENDED, here, dim), here, here.detach())
        inputs = x.split([module.count for module in self.modules], dim)
        outputs = [module.run(own, dim) for module, own in zip(self.modules, inputs, strict=True)]
        s = torch.cat(outputs, dim)
        multiplies = _along(index.algorithm == int(AlphaAlgorithm.MULTIPLY), here, dim)
        alpha = _along(index.alpha, here, dim)
        mixed = blend_rows(x, s, alpha, multiplies, self._gate_values(x, dim))
        mixed = _keep_isolated(here, mixed.to(h.dtype), isolated)
        back = mixed.index_select(dim, index.entry_of_row.clamp(min=0))
        return torch.where(_along(index.entry_of_row >= 0, h, dim), back, h), dim

    def _gate_values(self, x: Tensor, dim: int) -> Tensor | None:
        if self.gates is None:
            return None
        index = self.index
        at_gates = x.index_select(dim, index.entry_of_gate.clamp(min=0))
        # An unused gate has no effect.
        is_used = _along(index.entry_of_gate >= 0, at_gates, dim)
        opened = self.gates.run(torch.where(is_used, at_gates, at_gates.detach()), dim)
        every = opened.index_select(dim, index.gate_of_entry.clamp(min=0))
        has_gate = _along(index.gate_of_entry >= 0, every, dim)
        return torch.where(has_gate, every, torch.ones_like(every))

    def _run_kernels(self, h: Tensor) -> Tensor:
        from esper.lab.population.kernels.blending import blend_outputs, gather_inputs

        counts = tuple(module.count for module in self.modules)
        host, x, at_gates, inputs = gather_inputs(_flat_rows(h), self.index, counts)
        jobs: list[Job] = [
            (module.run_flat, own) for module, own in zip(self.modules, inputs, strict=True)
        ]
        if self.gates is not None:
            jobs.append((self.gates.run_flat, at_gates))
        outputs = self.streams.run(jobs)
        gate_values = None if self.gates is None else outputs.pop().flatten(1)
        s = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _image(blend_outputs(host, x, s, gate_values, self.index))


SlotForwards = tuple[SlotForward | None, ...]
"""The seeds at every slot; None if no row has one."""


class _SlotInVmap(LeavesVmap):
    """Leaves `vmap` at a slot: rows become an ordinary dimension; autograd works as usual."""

    @staticmethod
    def forward(h: Tensor, row: Tensor, slot: int, forwards: SlotForwards) -> Tensor:
        """Raise: outside of vmap there is no row dimension."""
        raise RuntimeError("a stacked slot runs only inside the population's vmap")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        h: Tensor,
        row: Tensor,
        slot: int,
        forwards: SlotForwards,
    ) -> tuple[Tensor, int]:
        """Run the seeds of all rows; return the outputs and the dimension of the rows."""
        h, dim = rows_leading(h, in_dims[0], info.batch_size)
        forward = forwards[slot]
        return (h, dim) if forward is None else forward.run(h, dim)


def apply_slot(h: Tensor, row: Tensor, slot: int, forwards: SlotForwards) -> Tensor:
    """Run the seeds of a slot from inside the stacked host.

    `row` is any value that differs by row: the activation itself may be the same for all rows, as
    long as they share their inputs.
    """
    return apply_function(_SlotInVmap, h, row, slot, forwards)


class _KeepIsolated(torch.autograd.Function):
    """An isolated row keeps the host's value; host and seed get its gradient. Others blend."""

    @staticmethod
    def forward(h: Tensor, mixed: Tensor, isolated: Tensor) -> Tensor:
        return torch.where(isolated, h, mixed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (isolated,) = ctx.saved_tensors
        return torch.where(isolated, grads[0], torch.zeros_like(grads[0])), grads[0], None


def _keep_isolated(h: Tensor, mixed: Tensor, isolated: Tensor) -> Tensor:
    return apply_function(_KeepIsolated, h, mixed, isolated)


def _along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """Reshape one value per row so that it broadcasts against `x`."""
    return values.reshape(*([1] * dim), -1, *([1] * (x.dim() - 1 - dim)))


def _flat_rows(x: Tensor) -> Tensor:
    """Return activations [n, B, ...] in the kernels' layout: channels of images last."""
    return (x.movedim(2, -1) if x.dim() == 5 else x).contiguous()


def _image(x: Tensor) -> Tensor:
    """Return the modules' layout: channels of images before height and width."""
    return x.movedim(-1, 2) if x.dim() == 5 else x
