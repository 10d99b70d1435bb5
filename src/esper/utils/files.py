"""Files and folders that are written whole or not at all.

A reader finds what was there before or what is there now, never a part: what is new is written
beside its place, made durable, and renamed in, whatever interrupts it. One process at a time may
write to a place; any number may read it meanwhile.

Nothing is written through a link. A folder that somebody sent may hold a link named like a file
that Esper writes, and that link may point at any file of the user who opens the folder.
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

from esper.leyline.errors import CheckpointError

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


def linked(path: Path) -> CheckpointError:
    """Return the error for a link in the place of something that is to be written."""
    try:
        there = f" to {os.readlink(path)}"
    except (OSError, ValueError):
        there = ""
    return CheckpointError(
        f"cannot save to {path}: it is a link{there}, and nothing is written through links; remove "
        "the link, or name the place itself"
    )


def refuse_link(path: Path) -> None:
    """Raise where a link lies at a path.

    Raises:
        CheckpointError: There is a link; what it points to is not touched.
    """
    if os.path.islink(path):
        raise linked(path)


def append_to(path: Path, *, folder: int | None = None) -> BinaryIO:
    """Open a file to write at its end; make it where it is missing. A link is never followed.

    Args:
        path: the file.
        folder: an open handle of the folder it lies in. The file is then looked for in that
            folder, wherever the folder has been moved to.

    Raises:
        CheckpointError: A link is there, or the file has another name elsewhere (a hard link).
        OSError: It cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | _NO_WAIT
    where: str | Path = path if folder is None else path.name
    if not _NO_FOLLOW:
        refuse_link(path)
    try:
        handle = os.open(where, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise linked(path) from None
        raise
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return os.fdopen(handle, "ab")
    os.close(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Is a folder, a pipe or a device, not a file", str(path))
    raise CheckpointError(
        f"cannot write {path}: the file has another name elsewhere (a hard link), which would "
        "change with it; put a copy of the file in its place"
    )


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that a reader finds the old text or the new one, never a part.

    Raises:
        CheckpointError: The disk refused, or something else than a file is there; what was there
            before is untouched.
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Raises:
        CheckpointError: The disk refused, or something else than a file is there, such as a link;
            what was there before is untouched.
    """
    target = _place(path)
    if target.exists() and not target.is_file():
        # A rename would put a file in the place of a device.
        raise CheckpointError(f"cannot save to {target}: it is not a file; choose another name")
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


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of exactly these files; one that holds any other is refused, never deleted.

    Raises:
        CheckpointError: The disk refused; what was there before is untouched.
    """
    target = _place(folder)
    try:
        _replace_folder(target, files)
    except CheckpointError:
        raise
    except OSError as error:
        raise _cannot_save(target, error) from error


def read_folder(folder: Path, read: Callable[[Path], T]) -> T:
    """Return what `read` makes of a folder that `write_folder` may be replacing meanwhile."""
    target = _real(folder)
    for _ in range(_READ_ATTEMPTS - 1):
        place = _locate(target)
        stamp = _stamp(place)
        try:
            return read(place)
        except CheckpointError:
            # A write may have moved the folder between two of its files: look again.
            now = _locate(target)
            if now == place and _stamp(now) == stamp:
                raise
    return read(_locate(target))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, and nothing else: a pipe or a device could keep a reader forever.

    Raises:
        OSError: It cannot be opened, or is no file; `strerror` says why.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = "Is a folder" if stat.S_ISDIR(mode) else "Is a pipe or a device, not a file"
        raise OSError(errno.EINVAL, what, os.fspath(path))
    return os.fdopen(handle, "rb")


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a file, at most so many bytes of it; see `open_regular`."""
    with open_regular(path) as file:
        return file.read(-1 if most is None else most)


def _place(path: Path) -> Path:
    """Return where a path is, of which only the folders before its last part may be links."""
    refuse_link(path)
    if path.name in ("", ".."):
        return _real(path)
    # The last part is not resolved: a link put there from now on is replaced, never followed.
    return _real(path.parent) / path.name


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a zero byte, or a character that no file name can hold
        raise CheckpointError(f"{str(path)!r} is no name of a file or folder") from None


def _aside(target: Path) -> Path:
    """Where the old state waits while the new one takes its place; always a complete one."""
    # Not `with_name`, which the root has none of.
    return target.parent / f".{target.name}.old"


def _temporary(target: Path) -> Path:
    return target.parent / f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _locate(target: Path) -> Path:
    """Return the folder to read: the target, or the old state if a crash left only that."""
    # The target is looked for again, as a save may end between the two looks.
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


def _replace_folder(target: Path, files: Mapping[str, bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    _refuse_foreign(target, set(files))
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
        # fail too, the old state is still aside, where `read_folder` finds it.
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


def _refuse_foreign(target: Path, ours: set[str]) -> None:
    """A folder with anything but these files in it is somebody's, and stays."""
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


# ---- One writer of a run folder at a time: a lock that ends with its process, however that ends


_WAIT_S = 0.4
_PAUSE_S = 0.02
_LOOKS = 5
_BETWEEN_LOOKS_S = 0.002


class WriterLock:
    """Holds the lock of one run folder from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        """Name the lock file; nothing is created yet."""
        self.path = path
        self.folder: int | None = None
        """An open handle of the folder while the lock is held, where the system has such handles.

        It stays the handle of this very folder, whatever is put under its name meanwhile.
        """
        self._file: tuple[int, int] | None = None
        self._lock = FileLock(
            path,
            # Somebody who only looks (`is_locked`) holds it for a moment.
            timeout=_WAIT_S,
            poll_interval=_PAUSE_S,
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
            on_acquired=self._sign,
        )

    def acquire(self) -> None:
        """Take the lock; the folder is made where it is missing.

        Raises:
            CheckpointError: Another process has it, or the folder cannot be written to.
        """
        # The lock itself refuses a link; this says so in words.
        refuse_link(self.path)
        try:
            self._lock.acquire()
            self._open_folder()
        except Timeout:
            raise CheckpointError(
                f"{self.path.parent} is being written by another process{_holder(self.path)}; "
                "wait for it or choose another folder"
            ) from None
        except CheckpointError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise CheckpointError(
                f"cannot write to {self.path.parent}: {error.strerror or error}; "
                "make the folder writable or choose another"
            ) from error

    def release(self) -> None:
        """Give the lock back; the file stays. Does nothing the second time."""
        self._file = None
        if self.folder is not None:
            os.close(self.folder)
            self.folder = None
        self._lock.release(force=True)

    @property
    def is_in_place(self) -> bool:
        """Whether the lock is held and still guards the folder of this name.

        A folder that was moved, removed or made anew has another lock file, or none.
        """
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
            return  # `acquire` refuses it
        # For the message of whoever is refused; the lock itself does not depend on it.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock with this file; nothing is written."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        # Others who look hold it for a moment too.
        for _ in range(_LOOKS):
            if lock_descriptor(handle, blocking=False):
                return False
            time.sleep(_BETWEEN_LOOKS_S)
        return True
    except OSError:
        # The file system has no such locks, so no run of ours is writing there.
        return False
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" (process {int(path.read_bytes()[:20])})"
    return ""
