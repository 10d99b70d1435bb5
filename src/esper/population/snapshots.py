"""Snapshots of rows as plain trees: put together, taken apart, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def join_rows(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put snapshots together, one after another."""
    return {name: _join([part[name] for part in parts]) for name in parts[0]}


def take_rows(saved: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return the snapshot of some of its rows."""
    return {
        name: take_rows(value, start, stop) if isinstance(value, Mapping) else value[start:stop]
        for name, value in saved.items()
    }


def first_difference(one: Any, other: Any, name: str = "") -> tuple[str, str] | None:
    """Return how two plain trees differ first, as "name value" of each; None when they do not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{name}.{key}" if name else str(key)
            found = first_difference(one.get(key), other.get(key), inner)
            if found is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            inner = f"{name}[{index}]" if isinstance(pair[0], Mapping) else name
            found = first_difference(*pair, inner)
            if found is not None:
                return found if isinstance(pair[0], Mapping) else _told(name, one, other)
        return None
    return None if one == other else _told(name, one, other)


def _told(name: str, one: Any, other: Any) -> tuple[str, str]:
    return f"{name} {one!r}", f"{name} {other!r}"


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return join_rows(values)
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    return [item for value in values for item in value]
