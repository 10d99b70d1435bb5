"""Finding where slots go: checks submodule names and infers topology and width from one batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.blueprints import TOPOLOGY_BY_RANK, Topology
from esper.leyline.errors import EsperWarning, SlotError, nearest


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one slot sits and what flows there."""

    name: str
    path: str
    topology: Topology
    shape: tuple[int, ...]


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for an example: a tensor, a tuple of arguments or a dict of them."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


def slot_paths(slots: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return {slot name: submodule path}; a plain list names slots by their paths."""
    if isinstance(slots, str):
        raise SlotError(f"slots must be a list of submodule names, got the text {slots!r}")
    paths = dict(slots) if isinstance(slots, Mapping) else {path: path for path in slots}
    if not paths:
        raise SlotError("slots is empty; name at least one submodule whose output may grow")
    if len(paths) != len(list(slots)):
        raise SlotError(f"slot names must differ, got {list(slots)}")
    return paths


def place_slots(
    model: nn.Module, slots: Sequence[str] | Mapping[str, str], example: Any
) -> list[Placement]:
    """Run the example once and return what each slot's submodule puts out."""
    paths = slot_paths(slots)
    modules = {path: _find(model, path) for path in paths.values()}
    outputs: dict[str, list[Any]] = {path: [] for path in modules}
    handles = [
        module.register_forward_hook(_recorder(outputs[path])) for path, module in modules.items()
    ]
    args, kwargs = call_arguments(example)
    try:
        with evaluating(model), torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    _warn_about_batch_norm(model)
    return [_place(name, path, outputs[path]) for name, path in paths.items()]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block and every module back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _find(model: nn.Module, path: str) -> nn.Module:
    known = [name for name, _ in model.named_modules() if name]
    try:
        if not path:
            raise AttributeError
        return model.get_submodule(path)
    except AttributeError:
        shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
        raise SlotError(
            f"the model has no submodule {path!r}{nearest(path, known) or ';'} it has: {shown}"
        ) from None


def _recorder(outputs: list[Any]) -> Any:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    return record


def _place(name: str, path: str, outputs: list[Any]) -> Placement:
    if not outputs:
        raise SlotError(
            f"submodule {path!r} was not called in a forward pass of the example input; "
            "a slot must be on the way from input to output"
        )
    if len(outputs) > 1:
        raise SlotError(
            f"submodule {path!r} was called {len(outputs)} times in one forward pass; a slot's "
            "submodule must be called once (give each use a submodule of its own)"
        )
    output = outputs[0]
    if not isinstance(output, Tensor):
        raise SlotError(
            f"submodule {path!r} returns {type(output).__name__}, not a tensor; "
            "choose a submodule that returns one tensor"
        )
    topology = TOPOLOGY_BY_RANK.get(output.dim())
    if topology is None or not output.is_floating_point():
        raise SlotError(
            f"submodule {path!r} puts out {output.dtype} of shape {list(output.shape)}; a slot "
            "needs floating-point [B, C], [B, T, C] or [B, C, H, W]"
        )
    return Placement(name, path, topology, tuple(output.shape))


def _warn_about_batch_norm(model: nn.Module) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        warnings.warn(
            "the model has BatchNorm layers: it will grow, but measured contributions are biased "
            "because their statistics were taken with every seed on; GroupNorm or LayerNorm avoid "
            "this",
            EsperWarning,
            stacklevel=4,
        )
