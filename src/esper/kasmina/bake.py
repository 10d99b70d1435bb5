"""Baking: a grown network as a plain `nn.Module`, made of its host and of PyTorch alone.

What a seed and its blending compute is written down as a `torch.fx.GraphModule`, a part of the
submodule it grew behind. So the result is of the host's own class, has all parameters in the usual
places, trains, can be pickled, exported and grown in again, and nothing of it needs Esper.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blending import blend
from esper.kasmina.inside import disconnect
from esper.kasmina.placement import Holder, Placement
from esper.kasmina.slot import Slot, SlotMode
from esper.leyline.axes import AXES
from esper.leyline.errors import SlotError, reason_of

_ALWAYS_THERE = ("torch", "_operator", "builtins", "math")
"""Packages whose parts and functions a plain module may use."""

GROWN = "grown"
"""What a seed is called in the submodule behind which it grew."""


class _Blended(nn.Module):
    """What a slot does to an activation, without a choice left that a graph could not hold."""

    alpha: Tensor

    def __init__(self, slot: Slot, dtype: torch.dtype) -> None:
        super().__init__()
        assert slot.seed is not None
        self.seed = slot.seed
        self.gate = slot.gate
        self._algorithm = slot.algorithm
        self._axes = AXES[slot.axes]
        self.register_buffer("alpha", slot.alpha.detach().to(dtype).clone())

    def forward(self, h: Tensor) -> Tensor:
        """Return the activation with the seed mixed in."""
        if self._axes.is_usual:
            return self._mix(h)
        return self._mix(h.permute(self._axes.order)).permute(self._axes.inverse).contiguous()

    def _mix(self, h: Tensor) -> Tensor:
        return blend(h, self.seed(h), self.alpha, self._algorithm, self.gate)


class _Attending(nn.Module):
    """A forward hook: the blended activation in place of the first thing the submodule puts out."""

    def __init__(self, blended: _Blended, holder: Holder) -> None:
        super().__init__()
        self.blended = blended
        self._holder: Holder = holder

    def forward(self, module: Any, args: Any, output: Any) -> Any:
        """Return what the submodule puts out from now on."""
        if self._holder == "tensor":
            return self.blended(output)
        first = self.blended(output[0])
        rest = output[1:]
        # fx writes the sum of a tuple, or of a list, with one that it only knows when it runs.
        return (first,) + rest if self._holder == "tuple" else [first] + rest  # noqa: RUF005


def bake(model: nn.Module, slots: Mapping[str, tuple[Slot, Placement]]) -> nn.Module:
    """Turn a model whose slots hang behind it, by path, into a plain one, in place."""
    disconnect(model)
    for path, (slot, placement) in slots.items():
        if slot.seed is None or slot.mode != SlotMode.BLEND:
            continue
        host = model.get_submodule(path)
        like = next(host.parameters(), next(model.parameters(), slot.alpha))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        blended = _Blended(slot, dtype)
        name = GROWN
        while hasattr(host, name):
            name += "_again"
        if isinstance(host, nn.Sequential) and placement.holder == "tensor":
            # Just one more step; a sequence would run a submodule of any other meaning too.
            host.add_module(name, _written_down(blended, slot))
            continue
        if isinstance(host, nn.Sequential) or placement.holder == "other":
            raise SlotError(
                f"submodule {path!r} puts out something that a plain module cannot take apart; "
                "keep the garden: garden.save(folder)"
            )
        part = _written_down(_Attending(blended, placement.holder), slot)
        host.add_module(name, part)
        host.register_forward_hook(part)
    return model


def _written_down(module: nn.Module, slot: Slot) -> fx.GraphModule:
    """Return what a module computes as a graph of PyTorch's own operations."""
    seed = type(slot.seed).__name__
    module.train(slot.training)
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:
        reason = reason_of(error)
        raise SlotError(
            f"the seed in slot {slot.name!r}, a {seed}, cannot be written down without Esper: "
            f"{reason}; keep the garden (garden.save(folder)) or export it"
        ) from error
    parts = [type(part) for part in graph.modules()]
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    for part in (*parts, *calls):
        home = (getattr(part, "__module__", None) or "torch").partition(".")[0]
        if home not in _ALWAYS_THERE:
            raise SlotError(
                f"the seed in slot {slot.name!r}, a {seed}, uses {part.__name__!r} of {home!r}, "
                "which a plain module would need again; keep the garden: garden.save(folder)"
            )
    for node in graph.graph.nodes:
        # Annotations, which a pickled graph would want to import.
        node.type = None
    graph.recompile()
    graph.train(slot.training)
    return graph


def baked_copy(model: nn.Module, slots: Mapping[str, tuple[Slot, Placement]]) -> nn.Module:
    """Return a plain copy of a model with what has grown behind it."""
    # Together: what model and slots share, hooks above all, must be shared by the copies.
    copied, own = copy.deepcopy((model, {path: slot for path, (slot, _) in slots.items()}))
    return bake(copied, {path: (own[path], slots[path][1]) for path in own})
