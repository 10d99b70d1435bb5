"""The one on-disk form of every saved state: a folder with a tree of plain data and tensors.

A saved state is a folder of three files: `tensors.safetensors` holds the tensors, `tree.json` the
nesting around them, `manifest.json` says what it is and carries the checksums. Nothing in it is
ever executed. A save is complete or did not happen: the folder is written beside its place, made
durable, and renamed in; a reader finds the old state or the new one, whatever interrupts the save.

One process at a time may save to a folder; any number may read it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from esper.leyline._tree import decode, encode, from_json, separate, to_json
from esper.leyline.errors import CheckpointError, UsageError

TENSORS_FILE = "tensors.safetensors"
TREE_FILE = "tree.json"
MANIFEST_FILE = "manifest.json"

_FORMAT = "esper-state"
_LAYOUT = 1
"""Version of the three files themselves; a kind of state has its own version beside it."""

_READ_ATTEMPTS = 20

_ADVICE = {
    errno.ENOSPC: "free some space or save elsewhere",
    errno.EDQUOT: "free some space or save elsewhere",
    errno.EROFS: "save to a place that is not read-only",
    errno.EACCES: "make it writable or save elsewhere",
    errno.EPERM: "make it writable or save elsewhere",
    errno.ENOTDIR: "a part of the path is a file; save elsewhere",
    errno.EEXIST: "a file is in the way; save elsewhere",
    errno.ENAMETOOLONG: "choose a shorter name",
}


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
    from esper._version import __version__

    if not isinstance(tree, dict):
        raise UsageError(f"a saved state is a dict, got {type(tree).__name__}")
    target = _real(folder)
    tensors: dict[str, Tensor] = {}
    encoded = encode(tree, "tree", tensors)
    files = {
        TENSORS_FILE: safetensors.torch.save(separate(tensors)),
        TREE_FILE: to_json(encoded),
    }
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "layout": _LAYOUT,
        "kind": kind,
        "version": version,
        "esper": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": encode(dict(meta or {}), "meta", None),
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        },
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    files[MANIFEST_FILE] = to_json(manifest)
    try:
        _replace_folder(target, files)
    except CheckpointError:
        raise
    except OSError as error:
        raise _cannot_save(target, error) from error


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
    target = _real(folder)
    for _ in range(_READ_ATTEMPTS - 1):
        place = _locate(target)
        stamp = _stamp(place)
        try:
            return _read_folder(place, kind, version, device)
        except CheckpointError:
            # A save may have moved the folder between two of its files: look again.
            now = _locate(target)
            if now == place and _stamp(now) == stamp:
                raise
    return _read_folder(_locate(target), kind, version, device)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that a reader finds the old text or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    target = _real(path)
    data = text.encode()
    fresh = _temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        try:
            _write_bytes(fresh, data)
            os.replace(fresh, target)
            sync_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_save(target, error) from error


# --------------------------------------------------------------------------------------- reading


def _read_folder(
    place: Path, kind: str, version: int, device: torch.device | str
) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = _read_manifest(place)
    if manifest["kind"] != kind:
        raise CheckpointError(
            f"{place} holds a saved {manifest['kind']!r} where a {kind!r} is needed; "
            f"give a folder that was saved as {kind!r}"
        )
    found = manifest["version"]
    if found != version:
        advice = (
            f"update Esper ({manifest['esper']} saved it)"
            if found > version
            else f"load it with the Esper that saved it ({manifest['esper']})"
        )
        raise CheckpointError(
            f"{place} is a {kind!r} of version {found}, but this Esper reads version {version}; "
            f"{advice}"
        )
    data = {name: _read_checked(place, name, manifest) for name in (TENSORS_FILE, TREE_FILE)}
    try:
        tensors = safetensors.torch.load(data[TENSORS_FILE])
    except (safetensors.SafetensorError, AssertionError, KeyError, ValueError) as error:
        raise _damaged(place, f"{TENSORS_FILE} cannot be read ({error})") from error
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    try:
        tree = decode(from_json(data[TREE_FILE]), tensors)
        meta = decode(manifest["meta"], {})
    except (RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise _damaged(place, f"its tree cannot be read ({error})") from error
    if not isinstance(tree, dict) or not isinstance(meta, dict):
        raise _damaged(place, f"{TREE_FILE} holds no tree")
    return tree, meta


def _read_manifest(place: Path) -> dict[str, Any]:
    if not place.exists():
        raise CheckpointError(f"there is no saved state at {place}; check the path")
    if not place.is_dir():
        raise CheckpointError(f"{place} is a file; a saved state is a folder with {MANIFEST_FILE}")
    if not (place / MANIFEST_FILE).exists():
        raise CheckpointError(
            f"{place} is no saved state: {MANIFEST_FILE} is missing; give a folder Esper saved"
        )
    data = _read_bytes(place / MANIFEST_FILE)
    try:
        manifest = from_json(data)
    except (RecursionError, ValueError) as error:
        raise _damaged(place, f"{MANIFEST_FILE} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{place} is no saved state: its {MANIFEST_FILE} is not Esper's; "
            "give a folder Esper saved"
        )
    layout = manifest.get("layout")
    if isinstance(layout, int) and layout > _LAYOUT:
        raise CheckpointError(
            f"{place} was saved by a newer Esper (layout {layout}, this one reads up to {_LAYOUT})"
            "; update Esper"
        )
    if manifest.get("checksum") != _manifest_checksum(manifest):
        raise _damaged(place, f"{MANIFEST_FILE} does not match its checksum")
    return manifest


def _read_checked(place: Path, name: str, manifest: dict[str, Any]) -> bytes:
    if not (place / name).exists():
        raise _damaged(place, f"{name} is missing")
    data = _read_bytes(place / name)
    size, checksum = manifest["files"][name]["size"], manifest["files"][name]["sha256"]
    if len(data) != size:
        raise _damaged(place, f"{name} has {len(data)} bytes instead of {size}")
    if hashlib.sha256(data).hexdigest() != checksum:
        raise _damaged(place, f"{name} does not match its checksum")
    return data


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; make it readable or use a copy"
        ) from error


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()


def _damaged(place: Path, what: str) -> CheckpointError:
    line = " ".join(what.split())
    return CheckpointError(f"the saved state {place} is damaged: {line}; use another copy of it")


# --------------------------------------------------------------------------------------- writing


def _real(path: Path) -> Path:
    # A link stays a link: what it points to is replaced.
    return Path(os.path.realpath(path))


def _aside(target: Path) -> Path:
    """Where the old state waits while the new one takes its place; always a complete one."""
    return target.with_name(f".{target.name}.old")


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _locate(target: Path) -> Path:
    """Return the folder to read: the target, or the old state if a crash left only that."""
    # The target is looked for again, as a save may end between the two looks.
    for place in (target, _aside(target), target):
        if place.exists():
            return place
    return target


def _stamp(place: Path) -> tuple[int, int] | None:
    try:
        status = place.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _replace_folder(target: Path, files: dict[str, bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    _refuse_foreign(target)
    fresh = _temporary(target)
    try:
        fresh.mkdir()
        for name, data in files.items():
            _write_bytes(fresh / name, data)
        sync_folder(fresh)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`; afterwards `fresh` is the old state, if any."""
    aside = _aside(target)
    replaces = target.exists()
    try:
        if replaces:
            os.rename(target, aside)
        os.rename(fresh, target)
        sync_folder(target.parent)
    except BaseException:
        # Back to how it was, seen from the disk: an interrupt may come anywhere. Should that
        # fail too, the old state is still aside, where `load_tree` finds it.
        with contextlib.suppress(OSError):
            if not fresh.exists():
                os.rename(target, fresh)
            if aside.exists():
                os.rename(aside, target)
        raise
    # The new state is safe; if this fails the next save tidies up.
    with contextlib.suppress(OSError):
        if replaces:
            os.rename(aside, fresh)


def _recover(target: Path) -> None:
    """Tidy up after a save that was killed."""
    aside = _aside(target)
    if aside.exists() and target.exists():
        stale = _temporary(target)
        os.rename(aside, stale)
        shutil.rmtree(stale, ignore_errors=True)
    elif aside.exists():
        os.rename(aside, target)
    _sweep(target)


def _sweep(target: Path) -> None:
    """Remove what killed processes left half-written beside the target."""
    prefix = f".{target.name}.tmp-"
    for path in target.parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        writer = path.name.removeprefix(prefix).partition("-")[0]
        if not writer.isdecimal() or _is_running(int(writer)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_running(process: int) -> bool:
    if os.name == "nt":  # there, signal 0 is not a question
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _refuse_foreign(target: Path) -> None:
    """A folder with anything but a saved state in it is somebody's, and stays."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"cannot save to {target}: a file is there; choose another folder")
    ours = {TENSORS_FILE, TREE_FILE, MANIFEST_FILE}
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in ours)
    if others:
        raise CheckpointError(
            f"cannot save to {target}: it holds other files ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}); choose a new or empty folder"
        )


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _cannot_save(target: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0, "check the disk or save elsewhere")
    kept = "; what was saved there before is untouched" if _locate(target).exists() else ""
    return CheckpointError(f"cannot save to {target}: {reason}; {advice}{kept}")
