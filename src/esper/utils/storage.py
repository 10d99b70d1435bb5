"""The one on-disk form of every saved state: a folder with a tree of plain data and tensors.

A saved state is a folder of three files: `tensors.safetensors` holds the tensors, `tree.json` the
nesting around them, `manifest.json` says what it is and carries the checksums. Nothing in it is
ever executed. A save is complete or did not happen (`leyline.files`).

The tree stays readable JSON: dicts are objects, lists are lists. What JSON does not know is an
object with one key that starts with "$": `$tensor` and `$complex` name a tensor, `$float` is a
number that is not finite, `$dict` holds the pairs of a dict that has such keys of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, UsageError
from esper.utils.files import read_folder, write_folder
from esper.utils.manifest import (
    MANIFEST_FILE,
    TENSORS_FILE,
    TREE_FILE,
    damaged,
    decode,
    from_json,
    parse_manifest,
    read_checked,
    refuse_other,
    to_json,
    write_manifest,
)
from esper.utils.process import software_versions

# ---- Whether a saved tree has the form that it must have: names, kinds, shapes, and legal values


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


def save_tree(
    folder: Path,
    tree: dict[str, Any],
    *,
    kind: str,
    version: int,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Save a tree of plain data and tensors as a folder, replacing an earlier state atomically.

    Args:
        folder: Where to save; parents are created. It must not exist, be empty, or hold a state
            that this function saved: anything else is refused, never deleted.
        tree: Dicts with text keys, lists, tuples (read back as lists), text, numbers, booleans,
            None and dense tensors of any device, nested at will.
        kind: What is saved, such as "garden"; `load_tree` asks for the same.
        version: Version of this kind's tree.
        meta: Plain data about the state, readable in the manifest without its tensors.

    Raises:
        UsageError: The tree holds something that cannot be saved.
        CheckpointError: The disk refused; what was saved there before is untouched.
    """
    if not isinstance(tree, dict):
        raise UsageError(f"a saved state is a dict, got {type(tree).__name__}")
    tensors: dict[str, Tensor] = {}
    encoded = encode(tree, "tree", tensors)
    files = {
        TENSORS_FILE: safetensors.torch.save(separate(tensors)),
        TREE_FILE: to_json(encoded),
    }
    versions = software_versions()
    files[MANIFEST_FILE] = write_manifest(
        files,
        kind=kind,
        version=version,
        software={name: versions[name] for name in ("esper", "python", "torch")},
        meta=encode(dict(meta or {}), "meta", None),
    )
    write_folder(folder, files)


def load_tree(
    folder: Path, *, kind: str, version: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree and the meta data that `save_tree` wrote, or refuse with the reason.

    Args:
        folder: A folder that `save_tree` wrote.
        kind: What it must hold.
        version: The version of this kind that the caller understands.
        device: Where the tensors go.

    Raises:
        CheckpointError: It is missing, damaged, foreign, of another kind or another version.
    """
    return read_folder(folder, lambda place: _read_state(place, kind, version, device))


def _read_state(
    place: Path, kind: str, version: int, device: torch.device | str
) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = parse_manifest(place)
    refuse_other(manifest, kind, version)
    data = {name: read_checked(manifest, name) for name in (TENSORS_FILE, TREE_FILE)}
    try:
        tensors = safetensors.torch.load(data[TENSORS_FILE])
    except (safetensors.SafetensorError, AssertionError, KeyError, ValueError) as error:
        raise damaged(place, f"{TENSORS_FILE} cannot be read ({error})") from error
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}

    def find(mark: str, name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"there is no tensor {name[:80]!r}")
        return torch.view_as_complex(tensors[name]) if mark == "$complex" else tensors[name]

    try:
        tree = decode(from_json(data[TREE_FILE]), find)
    except (RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(place, f"its tree cannot be read ({error})") from error
    if not isinstance(tree, dict):
        raise damaged(place, f"{TREE_FILE} holds no tree")
    return tree, dict(manifest.meta)


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
