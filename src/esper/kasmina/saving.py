"""Baking: a grown network as a plain `nn.Module`, made of its host and of PyTorch alone.

A seed and its blending are traced into a `torch.fx.GraphModule`, which becomes a part of the
submodule in front of the slot. So the result is of the host's own class, has all parameters in the
usual places, can be trained, pickled, exported and grown again, and does not need Esper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blueprints.kin import Kin
from esper.kasmina.slot import MIXING, Slot, SlotMode, blend
from esper.kasmina.slots.placement import Holder, Placement
from esper.kasmina.wrapping import disconnect
from esper.leyline.errors import SlotError, reason_of
from esper.leyline.slots import AXES
from esper.utils.files import as_path
from esper.utils.manifest import restoring
from esper.utils.storage import load_tree, save_tree

_ALWAYS_THERE = ("torch", "_operator", "builtins", "math")
"""Packages whose parts and functions a plain module may use."""

# A traced graph calls it whenever it runs, not once during tracing.
fx.wrap("hasattr")

GROWN = "grown"
"""Attribute name under which a seed is registered in its submodule."""


class _Blended(nn.Module):
    """A slot's computation with all choices fixed, so that fx can trace it."""

    alpha: Tensor

    def __init__(self, slot: Slot, holder: Holder, dtype: torch.dtype) -> None:
        super().__init__()
        assert slot.seed is not None
        self.seed = slot.seed
        self.gate = slot.gate
        self._algorithm = slot.algorithm
        self._axes = AXES[slot.axes]
        self._copies = slot.copied_blocks
        self._replaces = slot.mode == SlotMode.REPLACE
        self._holder: Holder = holder
        self.register_buffer("alpha", slot.alpha.detach().to(dtype).clone())

    def forward(self, h: Tensor) -> Tensor:
        """Return the activation with the seed mixed in."""
        if self._copies:
            return self.with_copies(h, lambda block, given: block(given))
        if self._axes.is_usual:
            return self._mix(h, self.seed(h))
        turned = h.permute(self._axes.order)
        return self._mix(turned, self.seed(turned)).permute(self._axes.inverse).contiguous()

    def with_copies(self, h: Tensor, call: Callable[[nn.Module, Tensor], Any]) -> Tensor:
        """Return the activation with the output of copied blocks, one after another, mixed in."""
        s = h
        for block in self._copies:
            output = call(block, s)
            s = output if self._holder == "tensor" else output[0]
        if self._replaces:
            return s
        if self._axes.is_usual:
            return self._mix(h, s)
        order, inverse = self._axes.order, self._axes.inverse
        return self._mix(h.permute(order), s.permute(order)).permute(inverse).contiguous()

    def _mix(self, h: Tensor, s: Tensor) -> Tensor:
        return blend(h, s, self.alpha, self._algorithm, self.gate)


class _SeedHook(nn.Module):
    """A forward hook that replaces the submodule's first output by the blended activation."""

    def __init__(self, blended: _Blended, holder: Holder) -> None:
        super().__init__()
        self.blended = blended
        self._holder: Holder = holder

    def forward(self, module: Any, args: Any, output: Any) -> Any:
        """Return what the submodule puts out from now on."""
        return self.put_back(output, self.blended(self.activation(output)))

    def activation(self, output: Any) -> Any:
        """Return the tensor that the slot works on."""
        return output if self._holder == "tensor" else output[0]

    def put_back(self, output: Any, first: Any) -> Any:
        """Return the output with another activation."""
        if self._holder == "tensor":
            return first
        rest = output[1:]
        # fx writes the sum of a tuple, or of a list, with one that it only knows when it runs.
        return (first,) + rest if self._holder == "tuple" else [first] + rest  # noqa: RUF005


class _CopyHook(_SeedHook):
    """The same for a copy of the submodule, called with the submodule's arguments."""

    def __init__(self, blended: _Blended, holder: Holder, kin: Kin) -> None:
        super().__init__(blended, holder)
        self._kin = kin

    def forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:  # type: ignore[override]
        """Return what the submodule puts out from now on."""
        kin, names = self._kin, list(self._kin.names)
        # A graph has a fixed number of arguments: one more must not be left out without a word.
        message = "a grown submodule must be called with the same arguments as when it was grown"
        torch._assert(args[kin.positional :] == (), message)
        given = kwargs.keys()
        torch._assert((given ^ names) == (given ^ given), message)
        for key in kin.empty:
            value = args[key] if isinstance(key, int) else kwargs[key]
            # None or a tensor. A cache would be filled by the block and by its copy.
            torch._assert(
                (value == None) | hasattr(value, "grad_fn"),  # noqa: E711
                f"a grown submodule takes None or a tensor as its argument {key!r}; where that is "
                "a cache, switch it off (use_cache=False)",
            )
        named = {name: kwargs[name] for name in names}
        others = [args[index] for index in range(1, kin.positional)]

        def call(block: nn.Module, h: Tensor) -> Any:
            return block(h, *others, **named) if kin.positional else block(**{**named, names[0]: h})

        return self.put_back(output, self.blended.with_copies(self.activation(output), call))


def bake(model: nn.Module, slots: Mapping[str, tuple[Slot, Placement]]) -> nn.Module:
    """Turn a model with slots, by path, into a plain one, in place."""
    disconnect(model)
    for path, (slot, placement) in slots.items():
        if slot.seed is None or slot.mode not in MIXING:
            continue
        host = model.get_submodule(path)
        like = next(host.parameters(), next(model.parameters(), slot.alpha))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        blended = _Blended(slot, placement.holder, dtype)
        name = GROWN
        while hasattr(host, name):
            name += "_again"
        if isinstance(host, nn.Sequential) and placement.holder == "tensor":
            # A Sequential runs every submodule in turn, so the seed is simply its last one.
            host.add_module(name, _traced(blended, slot))
            continue
        if isinstance(host, nn.Sequential) or placement.holder == "other":
            raise SlotError(
                f"submodule {path!r} returns a structure that a plain module cannot take apart; "
                "keep the garden: garden.save(folder)"
            )
        hook = _SeedHook(blended, placement.holder)
        if slot.copies:
            hook = _CopyHook(blended, placement.holder, placement.kin)
        part = _traced(hook, slot)
        host.add_module(name, part)
        host.register_forward_hook(part, with_kwargs=slot.copies > 0)
    return model


def _traced(module: nn.Module, slot: Slot) -> fx.GraphModule:
    """Return a module as a graph of PyTorch's own operations.

    A copy of the host's own block stays a module: whoever loads the host has its class.
    """
    seed = type(slot.seed).__name__
    kept = [part for block in slot.copied_blocks for part in block.modules()]
    modes = [(part, part.training) for part in kept]

    # Defined here because PyTorch does not pickle the name of a local tracer class.
    class _Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return m in kept or super().is_leaf_module(m, module_qualified_name)

    module.train(slot.training)
    try:
        graph = fx.GraphModule(module, _Tracer().trace(module), type(module).__name__)
    except Exception as error:
        reason = reason_of(error)
        raise SlotError(
            f"the seed in slot {slot.name!r}, a {seed}, cannot be traced into a plain module: "
            f"{reason}; keep the garden (garden.save(folder)) or export it"
        ) from error
    parts = [type(part) for part in graph.modules() if part not in kept]
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
    for part, mode in modes:
        part.training = mode
    return graph


def baked_copy(model: nn.Module, slots: Mapping[str, tuple[Slot, Placement]]) -> nn.Module:
    """Return a plain copy of a model with its seeds."""
    # In one call: the copies must share what model and slots share, hooks above all.
    copied, own = copy.deepcopy((model, {path: slot for path, (slot, _) in slots.items()}))
    return bake(copied, {path: (own[path], slots[path][1]) for path in own})


# ---- A garden on disk: its lifecycle as plain data, its weights as tensors, never any code


KIND = "garden"
VERSION = 4


def save_garden(state: Mapping[str, Any], folder: str | Path, meta: Mapping[str, Any]) -> None:
    """Write a garden's weights and lifecycle, its `state_dict`, into a folder."""
    place = as_path(folder, "grown")
    save_tree(place, {"garden": dict(state)}, kind=KIND, version=VERSION, meta=meta)


def read_garden(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state_dict, meta) of a saved garden after checking it."""
    place = as_path(folder, "grown")
    tree, meta = load_tree(place, kind=KIND, version=VERSION)
    with restoring(place):
        return dict(tree["garden"]), meta
