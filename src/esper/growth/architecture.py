"""What a host is made of: its parts in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.garden import Garden
from esper.kasmina.probe import call_arguments, evaluating
from esper.leyline.records import ModuleRecord

_ITSELF = "(itself)"


@dataclass(slots=True)
class _Part:
    path: str
    module: nn.Module
    parameters: int
    order: int | None = None
    shape: tuple[int, ...] | None = None


def describe_host(garden: Garden, example_input: Any) -> tuple[ModuleRecord, ...]:
    """Return the parts of a garden's host; a part is opened up only where a slot is inside."""
    places: dict[str, list[str]] = {}
    for slot, path in garden.slot_paths.items():
        places.setdefault(path, []).append(slot)
    parts = list(_parts(garden.model, "", frozenset(places), set()))
    _call(garden, example_input, parts)
    last = -1
    for part in parts:
        # A container that is never called itself stays beside the part before it.
        last = part.order = last if part.order is None else part.order
    return tuple(
        ModuleRecord(
            path=part.path or _ITSELF,
            kind=type(part.module).__name__,
            parameters=part.parameters,
            shape=part.shape,
            slots=tuple(places.get(part.path, ())),
        )
        for part in sorted(parts, key=lambda part: part.order or 0)
    )


def _parts(
    module: nn.Module, path: str, places: frozenset[str], counted: set[int]
) -> Iterator[_Part]:
    prefix = f"{path}." if path else ""
    is_opened = not path or any(place.startswith(prefix) for place in places)
    if is_opened:
        for name, child in module.named_children():
            yield from _parts(child, f"{prefix}{name}", places, counted)
    parameters = 0
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in counted:
            counted.add(id(parameter))
            parameters += parameter.numel()
    if not is_opened or path in places or parameters:
        yield _Part(path, module, parameters)


def _call(garden: Garden, example_input: Any, parts: list[_Part]) -> None:
    """Run the host once and note when each part was first called, and what it put out."""
    calls = iter(range(1_000_000_000))
    handles = [
        part.module.register_forward_hook(_recorder(part, lambda: next(calls))) for part in parts
    ]
    args, kwargs = call_arguments(example_input)
    try:
        with evaluating(garden), torch.no_grad():
            garden(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _recorder(part: _Part, count: Callable[[], int]) -> Callable[..., None]:
    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        number = count()
        if part.order is None:
            part.order = number
            part.shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else None

    return note
