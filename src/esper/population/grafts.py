"""Seeds of many rows at the slots of one stacked host.

At a slot, rows are ordered by blueprint; the seeds of one blueprint run as one stacked module on
their rows, and all rows are blended together, each by its own stage, style and amplitude, and put
back. The host runs under `vmap`; `Graft` is the place where a slot leaves it, works on all rows at
once, and goes back in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.kasmina.blending import blend_rows
from esper.population.stack import Stack


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring members of a slot with the same kind of module."""

    stack: Stack
    places: Tensor | None
    """int64 [k], their positions in the stack; None when they are the whole stack in order."""
    module: nn.Module
    """Used for its forward alone."""
    members: slice

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Run k sets of parameters on k activations, which lie along dimension `dim`."""
        leaves = self.stack.leaves
        if not leaves:
            result: Tensor = self.module(x.flatten(0, 1))
            return result.reshape(x.shape)
        if self.places is not None:
            leaves = {name: leaf.index_select(0, self.places) for name, leaf in leaves.items()}
        leaves = {name: leaf.to(x.dtype) for name, leaf in leaves.items()}
        out: Tensor = vmap(self._one, in_dims=(0, dim), out_dims=dim)(leaves, x)
        return out

    def _one(self, parameters: dict[str, Tensor], activation: Tensor) -> Tensor:
        result: Tensor = functional_call(self.module, parameters, (activation,))
        return result


@dataclass(frozen=True, slots=True)
class SlotGrafts:
    """All seeds at one slot: members ordered by blueprint, blended together."""

    rows: Tensor | None
    """int64 [n], the members' positions in the stacked batch; None when they are all, in order."""
    parts: tuple[Part, ...]
    alpha: Tensor
    """float64 [n], 1 where isolated."""
    isolated: Tensor | None
    """bool [n], in TRAINING; None where nobody is."""
    multiplies: Tensor | None
    """bool [n], algorithm MULTIPLY; None where nobody's is."""
    gates: Part | None
    gated: Tensor | None
    """int64 [k], the members that have a gate, in the order of `gates`."""

    def join(self, h: Tensor, dim: int) -> Tensor:
        """Return the activations behind the slot; rows lie along dimension `dim`, 0 or 1.

        Convolutions leave rows beside channels, as dimension 1. They stay there: moving them would
        copy every activation.
        """
        here = h if self.rows is None else h.index_select(dim, self.rows)
        wide = (*([1] * dim), -1, *([1] * (here.dim() - 1 - dim)))
        x = here
        isolated = None
        if self.isolated is not None:
            isolated = self.isolated.reshape(wide)
            x = torch.where(isolated, here.detach(), here)
        outputs = [part.run(_slice(x, dim, part.members), dim) for part in self.parts]
        s = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)
        multiplies = None if self.multiplies is None else self.multiplies.reshape(wide)
        mixed = blend_rows(x, s, self.alpha.reshape(wide), multiplies, self._opening(x, dim))
        if isolated is not None:
            mixed = _join(here, mixed, isolated)
        return mixed if self.rows is None else h.index_copy(dim, self.rows, mixed.to(h.dtype))

    def _opening(self, x: Tensor, dim: int) -> Tensor | None:
        if self.gates is None or self.gated is None:
            return None
        opened = self.gates.run(x.index_select(dim, self.gated), dim)
        shape = list(opened.shape)
        shape[dim] = x.shape[dim]
        return opened.new_ones(shape).index_copy(dim, self.gated, opened)


Grafts = tuple[SlotGrafts | None, ...]
"""What has grown at every slot; None where nothing has."""


class Graft(torch.autograd.Function):
    """Leaves `vmap` at a slot: the rows become one dimension again, and autograd follows."""

    @staticmethod
    def forward(h: Tensor, row: Tensor, slot: int, grafts: Grafts) -> Tensor:
        """Refuse: outside of vmap there is no row dimension to find."""
        raise RuntimeError("a stacked slot runs only inside the population's vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing: `vmap` below is made of operations that autograd follows by itself."""
        return None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        h: Tensor,
        row: Tensor,
        slot: int,
        grafts: Grafts,
    ) -> tuple[Tensor, int]:
        """Join the seeds of all rows and say where the rows are."""
        dim = in_dims[0]
        if dim is None:
            h, dim = h.expand(info.batch_size, *h.shape), 0
        elif dim > 1:
            h, dim = h.movedim(dim, 0), 0
        grown = grafts[slot]
        return (h if grown is None else grown.join(h, dim)), dim


def graft(h: Tensor, row: Tensor, slot: int, grafts: Grafts) -> Tensor:
    """Join the seeds of a slot from inside the stacked host.

    `row` is any number of this row: the activation itself may be the same for all rows, where
    they share their inputs and nothing has worked on them yet.
    """
    out: Tensor = Graft.apply(h, row, slot, grafts)  # type: ignore[no-untyped-call]
    return out


def _slice(x: Tensor, dim: int, members: slice) -> Tensor:
    return x.narrow(dim, members.start, members.stop - members.start)


class _Join(torch.autograd.Function):
    """Isolated rows keep the host's value while host and seed get its gradient; others blend."""

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


def _join(h: Tensor, mixed: Tensor, isolated: Tensor) -> Tensor:
    out: Tensor = _Join.apply(h, mixed, isolated)  # type: ignore[no-untyped-call]
    return out
