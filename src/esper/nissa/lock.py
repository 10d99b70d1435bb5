"""One writer per run: a lock the operating system releases when its process ends, however it ends.

SQLite has locks of its own, but they come and go with each transaction. This one is held for as
long as a run is being written, so a second writer is refused at once and `esper runs` can tell a
run that is going on from one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from esper.nissa.database import StoreError

_FAR = 1 << 30
_ATTEMPTS = 20
_PAUSE_S = 0.02


class WriterLock:
    """Holds the lock of one run from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        """Name the lock file; nothing is created yet."""
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise when another process has it."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(
                f"cannot write to {self.path.parent}: {error.strerror}; "
                "make the folder writable or choose another"
            ) from error
        # Somebody who only looks (`is_locked`) holds it for a moment.
        for attempt in range(_ATTEMPTS):
            if _try_lock(handle):
                break
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S)
        else:
            holder = _read_holder(handle)
            os.close(handle)
            raise StoreError(
                f"{self.path.parent} is being written by another process{holder}; "
                "wait for it or choose another folder"
            )
        self._handle = handle
        # For the message above; the lock itself does not depend on it.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give the lock back; the file stays."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock with this file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(handle, shared=True)
    finally:
        os.close(handle)


def _read_holder(handle: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" (process {int(os.read(handle, 20))})"
    return ""


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int, *, shared: bool = False) -> bool:
        try:
            os.lseek(handle, _FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int, *, shared: bool = False) -> bool:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
