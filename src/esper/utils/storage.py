"""The on-disk format of every saved state: a folder with a tree of plain data and tensors.

A saved state is a folder of three files: `tensors.safetensors` holds the tensors, `tree.json` the
nesting around them, `manifest.json` the kind, the version and the checksums. Nothing in it is ever
executed, and it is written atomically (`utils.files`).

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

# ---- Checks of a loaded tree: names, types, shapes and ranges


def check_like(found: Any, expected: Any, name: str) -> None:
    """Raise unless a tree has the same names, types and shapes as another one.

    Args:
        found: the loaded tree of mappings, tensors, numbers and text.
        expected: a tree of the right form; its values do not matter.
        name: its name in the message.
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
    """Return a mapping of names to tensors, or raise if it is something else."""
    _need(isinstance(found, Mapping), name, "a mapping of tensors", found)
    for key, value in found.items():
        _need(
            isinstance(key, str) and isinstance(value, Tensor), f"{name}.{key}", "a tensor", value
        )
    return dict(found)


def check_count(found: Any, name: str) -> int:
    """Return a whole number of at least 0, or raise if it is something else."""
    _need(type(found) is int and 0 <= found < 2**63, name, "a whole number from 0", found)
    number: int = found
    return number


def check_range(found: Tensor, low: float, high: float, name: str) -> None:
    """Raise if a tensor has a value outside a range, or NaN."""
    if not bool(((found >= low) & (found <= high)).all()):
        raise _damaged(f"{name} has values outside of {low:g} to {high:g}")


def _need(is_so: bool, name: str, what: str, found: Any) -> None:
    if not is_so:
        raise _damaged(f"{name} must be {what}, got {type(found).__name__}")


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"the saved state is damaged: {what}; use another copy of it")


_MAX_DEPTH = 100
_MAX_INT_BITS = 4096

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
)
"""Types that safetensors can hold; complex numbers are written as pairs of these."""


def save_tree(
    folder: Path,
    tree: dict[str, Any],
    *,
    kind: str,
    version: int,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Save a tree of plain data and tensors as a folder, atomically replacing an earlier state.

    Args:
        folder: Where to save; parents are created. A folder that holds other files is refused.
        tree: Nested dicts with text keys, lists, tuples (loaded as lists), text, numbers,
            booleans, None and dense tensors of any device.
        kind: What is saved, such as "garden"; `load_tree` takes the same.
        version: Version of this kind's tree.
        meta: Plain data for the manifest, readable without the tensors.

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
    """Return the tree and the meta data that `save_tree` wrote.

    Args:
        folder: A folder that `save_tree` wrote.
        kind: What it must hold.
        version: The version of this kind that the caller understands.
        device: Device of the tensors.

    Raises:
        CheckpointError: It is missing, damaged, no saved state, of another kind or version.
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
    """Return `value` as strict JSON data; tensors go into `tensors` under their path."""
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
    if str(plain.dtype).removeprefix("torch.") not in _DTYPES:
        known = ", ".join(sorted(_DTYPES))
        raise UsageError(f"{where} has the type {tensor.dtype}, which cannot be saved; use {known}")
    tensors[where] = plain.contiguous()
    return {"$complex" if tensor.is_complex() else "$tensor": where}


def _escape(key: str) -> str:
    """Return a key as a part of a tensor's name: in ASCII, and different for different keys."""
    return key.replace("~", "~0").replace("/", "~1").encode("unicode_escape").decode("ascii")


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with one storage each; safetensors cannot hold shared ones."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
