"""The manifest of a saved state, readable without PyTorch.

A saved state (`utils.storage`) is a folder of three files. `manifest.json` says what the state is
and of which version, which software saved it and when, and the size and checksum of the other two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from esper.leyline.errors import CheckpointError, EsperError
from esper.utils.files import read_folder, read_regular
from esper.utils.process import available_bytes

TENSORS_FILE = "tensors.safetensors"
TREE_FILE = "tree.json"
MANIFEST_FILE = "manifest.json"

_FORMAT = "esper-state"
_MOST_MANIFEST = 2**24
_LAYOUT = 2
"""Version of the three files; each kind of state has a version of its own besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a saved state, without its content."""

    path: Path
    """The folder of the state."""
    kind: str
    """What was saved: 'growing run', 'training run', 'policy', 'garden', ..."""
    version: int
    """Version of this kind."""
    created: datetime
    """When it was saved, in UTC."""
    software: Mapping[str, str]
    """Versions of esper, python and torch that saved it."""
    sizes: Mapping[str, int]
    """Bytes of every file."""
    checksums: Mapping[str, str]
    """SHA-256 of every file."""
    meta: Mapping[str, Any]
    """Further plain data."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def epoch(self) -> int | None:
        """Epochs done by a growing run; None for other states."""
        return self.meta.get("epoch")

    @property
    def round(self) -> int | None:
        """Rounds done by a training run; None for other states."""
        return self.meta.get("round")

    def to_mapping(self) -> dict[str, Any]:
        """Return the manifest as plain data."""
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
    """Return the manifest of the state in a folder; its other files are not read.

    Raises:
        CheckpointError: There is no saved state, its manifest is damaged, or it has the layout of
            another version of Esper.
    """
    return read_folder(Path(folder), parse_manifest)


def refuse_other(manifest: Manifest, kind: str, version: int) -> None:
    """Raise if a state is not of this kind and version."""
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
    """Return the content of a manifest; `meta` is plain data, encoded by `storage.encode`."""
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
    """Return the manifest in a folder that no process is writing."""
    if not os.path.exists(place):
        raise CheckpointError(f"there is no saved state at {place}; check the path")
    if not place.is_dir():
        raise CheckpointError(f"{place} is a file; a saved state is a folder with {MANIFEST_FILE}")
    if not (place / MANIFEST_FILE).exists():
        raise CheckpointError(
            f"{place} is no saved state: {MANIFEST_FILE} is missing; give a folder Esper saved"
        )
    data = read_bytes(place / MANIFEST_FILE, _MOST_MANIFEST + 1)
    if len(data) > _MOST_MANIFEST:
        raise damaged(place, f"{MANIFEST_FILE} is larger than {_MOST_MANIFEST // 2**20} MiB")
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
        files = _typed(found, "files", dict)
        return Manifest(
            path=place,
            kind=_typed(found, "kind", str),
            version=_typed(found, "version", int),
            created=datetime.fromisoformat(_typed(found, "created", str)),
            software={
                name: _typed(found["software"], name, str)
                for name in _typed(found, "software", dict)
            },
            sizes={name: _typed(entry, "size", int) for name, entry in files.items()},
            checksums={name: _typed(entry, "sha256", str) for name, entry in files.items()},
            meta=_meta(found),
        )
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise damaged(place, f"{MANIFEST_FILE} cannot be read ({error})") from error


T = TypeVar("T")


def _typed(entry: Any, name: str, kind: type[T]) -> T:
    """Return one field of a manifest, or raise if it has another type."""
    value = entry[name]
    # Not isinstance: True is an int too.
    if type(value) is not kind:
        raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _meta(found: Mapping[str, Any]) -> dict[str, Any]:
    meta = decode(found["meta"], _no_tensor)
    if not isinstance(meta, dict):
        raise TypeError("meta is no mapping")
    for name in ("epoch", "round"):
        if meta.get(name) is not None:
            _typed(meta, name, int)
    return meta


def _refuse_layout(place: Path, found: Mapping[str, Any]) -> None:
    layout = found.get("layout")
    if not isinstance(layout, int) or layout == _LAYOUT:
        return
    older = f"use it with that version ({found.get('esper', 'unknown')}), or save it again"
    age, advice = ("a newer", "update Esper") if layout > _LAYOUT else ("an older", older)
    raise CheckpointError(
        f"{place} was saved by {age} Esper (layout {layout}, this one reads {_LAYOUT}); {advice}"
    )


def read_checked(manifest: Manifest, name: str) -> bytes:
    """Return the content of a file after checking its size and its checksum."""
    place = manifest.path
    size, checksum = manifest.sizes.get(name, 0), manifest.checksums.get(name)
    # The size comes first: a damaged file may be too large to read.
    try:
        found = (place / name).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise damaged(place, f"{name} is missing") from None
    if found != size:
        raise damaged(place, f"{name} has {found} bytes instead of {size}")
    free = available_bytes()
    if free is not None and size > free:
        # Where the system overcommits memory, reading it would kill the process.
        raise CheckpointError(
            f"{place / name} has {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory "
            "are free; load it on a machine with more, or use another copy of it"
        )
    data = read_bytes(place / name)
    if hashlib.sha256(data).hexdigest() != checksum:
        raise damaged(place, f"{name} does not match its checksum")
    return data


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file, at most `most` bytes of it, or raise a CheckpointError."""
    try:
        return read_regular(path, most)
    except MemoryError:
        raise CheckpointError(
            f"cannot read {path}: it does not fit into memory; use another copy of it"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; make it readable or use a copy"
        ) from error


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest without its own entry."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()


UNFIT = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors that Python and PyTorch raise when a state does not fit the object it is loaded into."""


@contextmanager
def restoring(place: Path | str) -> Iterator[None]:
    """Turn errors while a state is loaded into a CheckpointError of one line.

    A state with correct checksums may still not fit the object it is loaded into.
    """
    try:
        yield
    except EsperError:
        raise
    except UNFIT as error:
        if "out of memory" in str(error):
            raise  # the state is not at fault
        reason = f"{type(error).__name__}: {error}"[:300]
        raise damaged(place, f"what it holds does not fit ({reason})") from error


def damaged(place: Path | str, what: str) -> CheckpointError:
    """Return the error for a damaged state."""
    line = " ".join(what.split())
    return CheckpointError(f"the saved state {place} is damaged: {line}; use another copy of it")


Leaf = Callable[[str, str], Any]
"""Function that returns the tensor of a mark (`$tensor` or `$complex`) and a name."""


def _no_tensor(mark: str, name: str) -> Any:
    raise ValueError("a manifest holds no tensors")


def decode(node: Any, leaf: Leaf) -> Any:
    """Undo `storage.encode`; raise ValueError for anything that it does not write."""
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
    """Undo `to_json`; raise ValueError for anything else, NaN included."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)
