"""Atomic writes of files and folders, and the lock of a run folder.

A reader finds the old content or the new one, never a part of it: new content is written beside
its place, synced to disk, and renamed into place. One process at a time may write to a place; any
number may read it meanwhile.

Nothing is written through a symbolic link. A folder from somebody else may hold a link with the
name of a file that Esper writes, and that link may point at any file of the user who opens the
folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout, lock_descriptor

from esper.leyline.errors import CheckpointError, UsageError

T = TypeVar("T")

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

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def as_path(path: object, example: str) -> Path:
    """Return a path that a user gave; refuse anything else, with an example of one."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"a path is a string such as {example!r}, got {path!r}")
    return Path(path)


def _link_error(path: Path) -> CheckpointError:
    """Return the error for a symbolic link where something is to be written."""
    try:
        there = f" to {os.readlink(path)}"
    except (OSError, ValueError):
        there = ""
    return CheckpointError(
        f"cannot save to {path}: it is a link{there}, and nothing is written through links; remove "
        "the link, or name the place itself"
    )


def refuse_link(path: Path) -> None:
    """Raise a CheckpointError if the path is a symbolic link; its target is not touched."""
    if os.path.islink(path):
        raise _link_error(path)


def append_to(path: Path, *, folder: int | None = None) -> BinaryIO:
    """Open a file for appending, and create it if it is missing. A link is never followed.

    Args:
        path: the file.
        folder: an open handle of its folder. The file is then opened in that folder, even if the
            folder has been moved.

    Raises:
        CheckpointError: The path is a symbolic link, or the file has further hard links.
        OSError: It cannot be opened, or is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | _NO_WAIT
    where: str | Path = path if folder is None else path.name
    if not _NO_FOLLOW:
        refuse_link(path)
    try:
        handle = os.open(where, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_error(path) from None
        raise
    if _regular(handle, path).st_nlink <= 1:
        return os.fdopen(handle, "ab")
    os.close(handle)
    raise CheckpointError(
        f"cannot write {path}: the file has another name elsewhere (a hard link), which would "
        "change with it; put a copy of the file in its place"
    )


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; see `atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds the old content or the new one.

    Raises:
        CheckpointError: The disk refused, or the path is no regular file, such as a link. The old
            content is untouched.
    """
    target = _place(path)
    if target.exists() and not target.is_file():
        # A rename would replace a device by a file.
        raise CheckpointError(f"cannot save to {target}: it is not a file; choose another name")
    fresh = _temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        _write_bytes(fresh, data)
        os.replace(fresh, target)
        sync_folder(target.parent)
    except OSError as error:
        raise _cannot_save(target, error) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of exactly these files, atomically.

    Raises:
        CheckpointError: The disk refused, or the folder holds other files. The old content is
            untouched.
    """
    target = _place(folder)
    fresh = _temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        _refuse_foreign(target, set(files))
        fresh.mkdir()
        for name, data in files.items():
            _write_bytes(fresh / name, data)
        sync_folder(fresh)
        _swap(fresh, target)
    except CheckpointError:
        raise
    except OSError as error:
        raise _cannot_save(target, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_folder(folder: Path, read: Callable[[Path], T]) -> T:
    """Return `read(folder)` for a folder that `write_folder` may be replacing meanwhile."""
    target = _real(folder)
    for _ in range(_READ_ATTEMPTS - 1):
        place = _locate(target)
        stamp = _stamp(place)
        try:
            return read(place)
        except CheckpointError:
            # A write may have moved the folder between reads of two of its files: try again.
            now = _locate(target)
            if now == place and _stamp(now) == stamp:
                raise
    return read(_locate(target))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; reading from a pipe or a device could block for ever.

    Raises:
        OSError: It cannot be opened, or is no regular file; `strerror` says why.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    _regular(handle, path)
    return os.fdopen(handle, "rb")


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a regular file, at most `most` bytes of it."""
    with open_regular(path) as file:
        return file.read(-1 if most is None else most)


def _regular(handle: int, path: str | os.PathLike[str]) -> os.stat_result:
    """Return the status of an open file; close it and raise if it is no regular file."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        is_folder = stat.S_ISDIR(status.st_mode)
        what = "Is a folder" if is_folder else "Is a pipe or a device, not a file"
        raise OSError(errno.EINVAL, what, os.fspath(path))
    return status


def _place(path: Path) -> Path:
    """Return a path with links resolved in all its parts but the last, which must be no link."""
    refuse_link(path)
    if path.name in ("", ".."):
        return _real(path)
    # The last part stays: a link that is created there from now on is replaced, never followed.
    return _real(path.parent) / path.name


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a zero byte, or a character that no file name can hold
        raise CheckpointError(f"{str(path)!r} is no name of a file or folder") from None


def _aside(target: Path) -> Path:
    """Return where the old state is kept while the new one is renamed into place."""
    # `with_name` does not work for the root.
    return target.parent / f".{target.name}.old"


def _temporary(target: Path) -> Path:
    return target.parent / f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _locate(target: Path) -> Path:
    """Return the folder to read: the target, or the old state if a crash left only that one."""
    # The target is tried again, because a save may end between the first two tries.
    for place in (target, _aside(target), target):
        if os.path.exists(place):
            return place
    return target


def _stamp(place: Path) -> tuple[int, int] | None:
    try:
        status = place.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _swap(fresh: Path, target: Path) -> None:
    """Rename `fresh` to `target`; afterwards `fresh` is the old state, if there was one."""
    aside = _aside(target)
    replaces = target.exists()
    try:
        if replaces:
            os.rename(target, aside)
        os.rename(fresh, target)
        sync_folder(target.parent)
    except BaseException:
        # Undo by what is on the disk, because an interrupt may come anywhere. If that fails too,
        # `read_folder` still finds the old state aside.
        with contextlib.suppress(OSError):
            if not fresh.exists():
                os.rename(target, fresh)
            if aside.exists():
                os.rename(aside, target)
        raise
    # The new state is safe; if this fails, the next save cleans up.
    with contextlib.suppress(OSError):
        if replaces:
            os.rename(aside, fresh)


def _recover(target: Path) -> None:
    """Clean up after a save that was killed."""
    aside = _aside(target)
    if aside.exists() and target.exists():
        stale = _temporary(target)
        os.rename(aside, stale)
        shutil.rmtree(stale, ignore_errors=True)
    elif aside.exists():
        os.rename(aside, target)
    _sweep(target)


def _sweep(target: Path) -> None:
    """Remove temporary files that killed processes left beside the target."""
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
    if os.name == "nt":  # there, signal 0 would end the process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _refuse_foreign(target: Path, ours: set[str]) -> None:
    """Raise if a folder holds any other files: they are the user's."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"cannot save to {target}: a file is there; choose another folder")
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
    """Sync the entries of a folder to disk, where the system can do that."""
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


# ---- The lock of a run folder: one writer at a time; the system releases it with its process


_WAIT_S = 0.4
_PAUSE_S = 0.02
_LOOKS = 5
_BETWEEN_LOOKS_S = 0.002


class WriterLock:
    """The lock of one run folder, held from `acquire` to `release`.

    Args:
        path: the lock file; `acquire` creates it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: int | None = None
        """An open handle of the folder while the lock is held, where the system has such handles.

        It stays the handle of this folder even if another takes its name meanwhile.
        """
        self._file: tuple[int, int] | None = None
        self._lock = FileLock(
            path,
            # `is_locked` holds it for a moment.
            timeout=_WAIT_S,
            poll_interval=_PAUSE_S,
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
            on_acquired=self._sign,
        )

    def acquire(self) -> None:
        """Take the lock; create the folder if it is missing.

        Raises:
            CheckpointError: Another process has it, or the folder cannot be written to.
        """
        # FileLock refuses a link too, but with a worse message.
        refuse_link(self.path)
        try:
            self._lock.acquire()
            self._open_folder()
        except Timeout:
            raise CheckpointError(
                f"{self.path.parent} is being written by another process{_holder(self.path)}; "
                "wait for it or choose another folder"
            ) from None
        except OSError as error:
            self.release()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"cannot write to {self.path.parent}: {error.strerror or error}; "
                "make the folder writable or choose another"
            ) from error

    def release(self) -> None:
        """Release the lock, if it is held; the file stays."""
        self._file = None
        if self.folder is not None:
            os.close(self.folder)
            self.folder = None
        self._lock.release(force=True)

    @property
    def is_in_place(self) -> bool:
        """Whether the lock is held and the folder was not moved, removed or created anew."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def _open_folder(self) -> None:
        if os.open not in os.supports_dir_fd:
            return
        self.folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        inside = os.stat(self.path.name, dir_fd=self.folder, follow_symlinks=False)
        if (inside.st_dev, inside.st_ino) != self._file or inside.st_nlink > 1:
            raise CheckpointError(
                f"cannot write to {self.path.parent}: its {self.path.name} was replaced, or has "
                "another name elsewhere (a hard link); remove that file"
            )

    def _sign(self, handle: int) -> None:
        status = os.fstat(handle)
        self._file = status.st_dev, status.st_ino
        if status.st_nlink > 1:
            return  # `_open_folder` raises
        # The process id is only for the error message of other processes.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock of this file; nothing is written."""
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT)
    except OSError:
        return False
    try:
        # Other calls of this function hold it for a moment too.
        for _ in range(_LOOKS):
            if lock_descriptor(handle, blocking=False):
                return False
            time.sleep(_BETWEEN_LOOKS_S)
        return True
    except OSError:
        # The file system has no locks, so no run of Esper is writing there.
        return False
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" (process {int(path.read_bytes()[:20])})"
    return ""
