"""One writer of a run folder at a time: a lock that ends with its process, however that ends.

The lock is the operating system's (`filelock`), on a file that stays. Whoever wants to write takes
it before touching anything else in the folder; whoever only looks needs no lock, and can ask
whether somebody writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from esper.leyline.errors import CheckpointError
from esper.leyline.files import refuse_link

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
