"""What a host is made of: its parts in the order in which they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.kasmina.garden import Garden
from esper.kasmina.probe import look
from esper.leyline.grouping import grouped
from esper.leyline.records import ModuleRecord

_ITSELF = "(itself)"


class _Part(NamedTuple):
    path: str
    module: nn.Module
    parameters: int


def describe_host(garden: Garden, example_input: Any) -> tuple[ModuleRecord, ...]:
    """Return the parts of a garden's host; a part is opened up only where a slot is inside."""
    places = grouped((path, slot) for slot, path in garden.slot_paths.items())
    parts = list(_parts(garden.model, "", frozenset(places), set()))
    seen = look(garden, {part.path: part.module for part in parts}, example_input)
    if seen.error is not None:
        raise seen.error
    called = {path: number for number, path in enumerate(seen.kinds)}
    order: dict[str, int] = {}
    last = -1
    for part in parts:
        # A container that is never called itself stays beside the part before it.
        last = order[part.path] = called.get(part.path, last)
    return tuple(
        ModuleRecord(
            path=part.path or _ITSELF,
            kind=type(part.module).__name__,
            parameters=part.parameters,
            shape=_shape(seen.outputs[part.path]),
            slots=tuple(places.get(part.path, ())),
        )
        for part in sorted(parts, key=lambda part: order[part.path])
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


def _shape(outputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the shape of one sample of what a part first put out, None where it is no tensor."""
    first = outputs[0] if outputs else None
    return tuple(first.shape[1:]) if isinstance(first, Tensor) else None
