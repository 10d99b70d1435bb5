"""Trees of plain data and tensors as strict JSON and a flat dict of tensors, and back.

The JSON stays readable: dicts are objects, lists are lists. What JSON does not know is an object
with one key that starts with "$": `$tensor` and `$complex` name a tensor, `$float` is a number that
is not finite, `$dict` holds the pairs of a dict that has such keys of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import UsageError

_MAX_DEPTH = 100
_MAX_INT_BITS = 4096

_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""What the tensor file can hold; complex numbers are written as pairs of these."""


def encode(value: Any, where: str, tensors: dict[str, Tensor] | None, depth: int = 0) -> Any:
    """Return `value` as strict JSON data; tensors go into `tensors` under the name of their place.

    What JSON does not know is an object with one key that starts with "$".
    """
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"{where[:80]}... is nested deeper than {_MAX_DEPTH} levels or contains itself; "
            "a saved state is a tree"
        )
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise UsageError(f"{where} is a whole number of more than {_MAX_INT_BITS} bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}; keys of a saved state must be text")
        children = {
            str(key): encode(child, f"{where}/{_escape(key)}", tensors, depth + 1)
            for key, child in value.items()
        }
        if any(key.startswith("$") for key in children):
            return {"$dict": [[key, child] for key, child in children.items()]}
        return children
    if isinstance(value, list | tuple):
        return [
            encode(child, f"{where}/{index}", tensors, depth + 1)
            for index, child in enumerate(value)
        ]
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; "
        "use dicts, lists, text, numbers, booleans, None and tensors"
    )


def _encode_tensor(tensor: Tensor, where: str, tensors: dict[str, Tensor] | None) -> Any:
    if tensors is None:
        raise UsageError(f"{where} is a tensor; meta data is plain, tensors belong into the tree")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(f"{where} is a sparse or meta tensor; only dense tensors can be saved")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype not in _DTYPES:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
        raise UsageError(f"{where} has the type {tensor.dtype}, which cannot be saved; use {known}")
    tensors[where] = plain.contiguous()
    return {"$complex" if tensor.is_complex() else "$tensor": where}


def _escape(key: str) -> str:
    """Return a key as a part of a tensor's name: ASCII, and no two places share a name."""
    return key.replace("~", "~0").replace("/", "~1").encode("unicode_escape").decode("ascii")


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a storage each; the format does not know shared ones."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


def decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `encode`; anything it would not have written raises ValueError."""
    if isinstance(node, list):
        return [decode(child, tensors) for child in node]
    if not isinstance(node, dict):
        return node
    if not any(key.startswith("$") for key in node):
        return {key: decode(child, tensors) for key, child in node.items()}
    match list(node.items()):
        case [("$float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("$tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("$complex", str(name))] if name in tensors:
            return torch.view_as_complex(tensors[name])
        case [("$dict", list(pairs))]:
            return {str(key): decode(child, tensors) for key, child in pairs}
    raise ValueError(f"unknown entry {str(node)[:80]!r}")


def to_json(value: Any) -> bytes:
    """Return strict JSON in ASCII."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def from_json(data: bytes) -> Any:
    """Undo `to_json`; anything else raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)
