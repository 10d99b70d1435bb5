"""What a saved state says of itself, readable without PyTorch.

A saved state (`leyline.storage`) is a folder of three files. `manifest.json` is the one to read
first: what the state is and of which version, what software saved it when, and the size and the
checksum of the other two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from esper.leyline.errors import CheckpointError
from esper.leyline.files import read_folder

TENSORS_FILE = "tensors.safetensors"
TREE_FILE = "tree.json"
MANIFEST_FILE = "manifest.json"

_FORMAT = "esper-state"
_LAYOUT = 2
"""Version of the three files themselves; a kind of state has its own version beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a saved state is, without what it holds."""

    path: Path
    """The folder of the state."""
    kind: str
    """What was saved: 'growing run', 'training run', 'policy', 'garden', ..."""
    version: int
    """Version of this kind."""
    created: datetime
    """When it was saved, in UTC."""
    software: Mapping[str, str]
    """What saved it: the versions of esper, python and torch."""
    sizes: Mapping[str, int]
    """Bytes of every file."""
    checksums: Mapping[str, str]
    """SHA-256 of every file."""
    meta: Mapping[str, Any]
    """What else whoever saved it wrote down."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def epoch(self) -> int | None:
        """Epochs a growing run had done; None for anything else."""
        return self.meta.get("epoch")

    @property
    def round(self) -> int | None:
        """Rounds a training run had done; None for anything else."""
        return self.meta.get("round")

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data for programs."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "version": self.version,
            "created": self.created.isoformat(),
            "software": dict(self.software),
            "files": {
                name: {"size": size, "sha256": self.checksums[name]}
                for name, size in self.sizes.items()
            },
            "epoch": self.epoch,
            "round": self.round,
            "meta": dict(self.meta),
        }


def read_manifest(folder: Path) -> Manifest:
    """Return what the state in a folder says of itself; its other files are not looked at.

    Raises:
        CheckpointError: There is no saved state, its manifest is damaged, or another version of
            Esper laid it out.
    """
    return read_folder(Path(folder), parse_manifest)


def refuse_other(manifest: Manifest, kind: str, version: int) -> None:
    """Raise where a state is not of the kind and the version that the caller reads."""
    place, found = manifest.path, manifest.version
    if manifest.kind != kind:
        raise CheckpointError(
            f"{place} holds a saved {manifest.kind!r} where a {kind!r} is needed; "
            f"give a folder that was saved as {kind!r}"
        )
    if found != version:
        saver = manifest.software.get("esper", "unknown")
        advice = (
            f"update Esper ({saver} saved it)"
            if found > version
            else f"load it with the Esper that saved it ({saver})"
        )
        raise CheckpointError(
            f"{place} is a {kind!r} of version {found}, but this Esper reads version {version}; "
            f"{advice}"
        )


def write_manifest(
    files: Mapping[str, bytes], *, kind: str, version: int, software: Mapping[str, str], meta: Any
) -> bytes:
    """Return the content of a manifest; `meta` is plain data as `storage` encodes it."""
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "layout": _LAYOUT,
        "kind": kind,
        "version": version,
        "software": dict(software),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": meta,
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        },
    }
    manifest["checksum"] = manifest_checksum(manifest)
    return to_json(manifest)


def parse_manifest(place: Path) -> Manifest:
    """Return the manifest in a folder that nobody is writing."""
    if not place.exists():
        raise CheckpointError(f"there is no saved state at {place}; check the path")
    if not place.is_dir():
        raise CheckpointError(f"{place} is a file; a saved state is a folder with {MANIFEST_FILE}")
    if not (place / MANIFEST_FILE).exists():
        raise CheckpointError(
            f"{place} is no saved state: {MANIFEST_FILE} is missing; give a folder Esper saved"
        )
    data = read_bytes(place / MANIFEST_FILE)
    try:
        found = from_json(data)
    except (RecursionError, ValueError) as error:
        raise damaged(place, f"{MANIFEST_FILE} cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(
            f"{place} is no saved state: its {MANIFEST_FILE} is not Esper's; "
            "give a folder Esper saved"
        )
    _refuse_layout(place, found)
    if found.get("checksum") != manifest_checksum(found):
        raise damaged(place, f"{MANIFEST_FILE} does not match its checksum")
    try:
        meta = decode(found["meta"], _no_tensor)
        if not isinstance(meta, dict):
            raise TypeError("meta is no mapping")
        return Manifest(
            path=place,
            kind=found["kind"],
            version=found["version"],
            created=datetime.fromisoformat(found["created"]),
            software=found["software"],
            sizes={name: entry["size"] for name, entry in found["files"].items()},
            checksums={name: entry["sha256"] for name, entry in found["files"].items()},
            meta=meta,
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(place, f"{MANIFEST_FILE} cannot be read ({error})") from error


def _refuse_layout(place: Path, found: Mapping[str, Any]) -> None:
    layout = found.get("layout")
    if not isinstance(layout, int) or layout == _LAYOUT:
        return
    if layout > _LAYOUT:
        raise CheckpointError(
            f"{place} was saved by a newer Esper (layout {layout}, this one reads {_LAYOUT})"
            "; update Esper"
        )
    raise CheckpointError(
        f"{place} was saved by an older Esper (layout {layout}, this one reads {_LAYOUT}); "
        f"use it with that one ({found.get('esper', 'unknown')}), or make it anew"
    )


def read_checked(manifest: Manifest, name: str) -> bytes:
    """Return the content of a file after comparing it with its size and its checksum."""
    place = manifest.path
    if not (place / name).exists():
        raise damaged(place, f"{name} is missing")
    data = read_bytes(place / name)
    size, checksum = manifest.sizes.get(name), manifest.checksums.get(name)
    if len(data) != size:
        raise damaged(place, f"{name} has {len(data)} bytes instead of {size}")
    if hashlib.sha256(data).hexdigest() != checksum:
        raise damaged(place, f"{name} does not match its checksum")
    return data


def read_bytes(path: Path) -> bytes:
    """Return a file's content."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; make it readable or use a copy"
        ) from error


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest without its own entry."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()


def damaged(place: Path, what: str) -> CheckpointError:
    """Return the error for a saved state that is not as it was saved."""
    line = " ".join(what.split())
    return CheckpointError(f"the saved state {place} is damaged: {line}; use another copy of it")


Leaf = Callable[[str, str], Any]
"""Returns the tensor of a mark (`$tensor` or `$complex`) and a name, or raises ValueError."""


def _no_tensor(mark: str, name: str) -> Any:
    raise ValueError("a manifest holds no tensors")


def decode(node: Any, leaf: Leaf) -> Any:
    """Undo `storage.encode`; anything it would not have written raises ValueError."""
    if isinstance(node, list):
        return [decode(child, leaf) for child in node]
    if not isinstance(node, dict):
        return node
    if not any(key.startswith("$") for key in node):
        return {key: decode(child, leaf) for key, child in node.items()}
    match list(node.items()):
        case [("$float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("$tensor" | "$complex" as mark, str(name))]:
            return leaf(mark, name)
        case [("$dict", list(pairs))]:
            return {str(key): decode(child, leaf) for key, child in pairs}
    raise ValueError(f"unknown entry {str(node)[:80]!r}")


def to_json(value: Any) -> bytes:
    """Return strict JSON in ASCII."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def from_json(data: bytes) -> Any:
    """Undo `to_json`; anything else raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)
