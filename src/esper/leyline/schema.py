"""Whether a saved tree has the form that it must have: names, kinds, shapes, and legal values.

Checksums say that a state is as it was saved, not that Esper saved it. What comes from a folder is
compared with what is there already, before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from esper.leyline.errors import CheckpointError


def check_like(found: Any, expected: Any, name: str) -> None:
    """Refuse a tree that has other names, kinds, or tensors of other shapes than another one.

    Args:
        found: what was read: mappings, tensors, numbers and texts.
        expected: a tree of the right form, with whatever values.
        name: what it is, for the message.
    """
    if isinstance(expected, Mapping):
        _need(isinstance(found, Mapping), name, "a mapping", found)
        missing, strange = expected.keys() - found.keys(), found.keys() - expected.keys()
        if missing or strange:
            which, word = (missing, "missing") if missing else (strange, "unknown")
            raise _damaged(f"{name}.{min(map(str, which))} is {word}")
        for key, value in expected.items():
            check_like(found[key], value, f"{name}.{key}")
    elif isinstance(expected, Tensor):
        _need(isinstance(found, Tensor), name, "a tensor", found)
        for what, one, other in (
            ("of shape", list(found.shape), list(expected.shape)),
            ("of type", found.dtype, expected.dtype),
        ):
            if one != other:
                raise _damaged(f"{name} is {what} {one} where {other} is needed")
    else:
        _need(type(found) is type(expected), name, f"of type {type(expected).__name__}", found)


def check_tensors(found: Any, name: str) -> dict[str, Tensor]:
    """Return tensors by name, or refuse what is something else."""
    _need(isinstance(found, Mapping), name, "a mapping of tensors", found)
    for key, value in found.items():
        _need(
            isinstance(key, str) and isinstance(value, Tensor), f"{name}.{key}", "a tensor", value
        )
    return dict(found)


def check_count(found: Any, name: str) -> int:
    """Return a whole number of at least 0, or refuse what is something else."""
    _need(type(found) is int and 0 <= found < 2**63, name, "a whole number from 0", found)
    number: int = found
    return number


def check_range(found: Tensor, low: float, high: float, name: str) -> None:
    """Refuse a tensor with a value outside of a range, or that is no number."""
    if not bool(((found >= low) & (found <= high)).all()):
        raise _damaged(f"{name} has values outside of {low:g} to {high:g}")


def _need(is_so: bool, name: str, what: str, found: Any) -> None:
    if not is_so:
        raise _damaged(f"{name} must be {what}, got {type(found).__name__}")


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"the saved state is damaged: {what}; use another copy of it")
