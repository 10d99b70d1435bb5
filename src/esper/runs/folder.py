"""A run folder: settings, log, and what else a run leaves behind.

`config.yaml` is complete and resolved; `log.txt` has one line per entry; checkpoints, the store and
what sinks write lie beside them. A folder is refused rather than overwritten unless the caller says
so, and nothing in it that a run did not write is ever removed. Whoever writes holds the folder's
lock from before the first change to the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from esper.leyline.documents import read_document
from esper.leyline.errors import CheckpointError, ConfigError, EsperError, UsageError, reason_of
from esper.leyline.files import append_to, atomic_write_text, refuse_link
from esper.leyline.lock import WriterLock
from esper.nissa.database import LOCK_FILE, STORE_FILES
from esper.nissa.listing import COMMAND

SETTINGS = "config.yaml"
CHECKPOINTS = "checkpoints"
"""Where checkpoints lie in a run folder."""

# The settings come last: while they are there, the folder is known to be a run's. The lock file
# stays, or two processes could hold the locks of two files of the same name.
_OWN = (
    CHECKPOINTS,
    "log.txt",
    "report.html",
    "grown",
    "grown.onnx",
    "grown.pt2",
    "summary.json",
    "results.jsonl",
    "results.json",
    "report.md",
    "ratios.jsonl",
    "schedule.json",
    "lessons.json",
    "privileged.json",
    "contextual.json",
    "heuristic.json",
    "tb",
    *(name for name in STORE_FILES if name != LOCK_FILE),
    SETTINGS,
)


class RunFolder:
    """Creates one run folder, reads its settings and writes its log."""

    def __init__(self, path: str | Path) -> None:
        """Look at a folder; nothing is created yet."""
        self.path = Path(path)
        self._lock: WriterLock | None = None

    @property
    def is_run(self) -> bool:
        """Whether a run was started here."""
        return os.path.isfile(self.path / SETTINGS)

    @contextmanager
    def claim(self) -> Iterator[WriterLock]:
        """Hold the lock of the folder within the block, and afterwards if the block succeeded.

        What is opened in the block takes the lock over; a block that fails gives it back.

        Raises:
            CheckpointError: Another process writes to the folder, which stays as it is.
        """
        lock = WriterLock(self.path / LOCK_FILE)
        lock.acquire()
        self._lock = lock
        try:
            yield lock
        except BaseException:
            lock.release()
            raise

    @contextmanager
    def claim_new(self, config: Mapping[str, Any], *, overwrite: bool) -> Iterator[WriterLock]:
        """Make the folder with these settings, and hold its lock as `claim` does.

        Raises:
            UsageError: The folder is in use, somebody else's, or cannot be made.
            CheckpointError: Another process writes to the folder, which stays as it is.
        """
        with self._explained():
            self._refuse_taken(overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
        with self.claim() as lock:
            with self._explained():
                # Somebody may have started a run between the look above and the lock.
                self._refuse_taken(overwrite)
                self._remove_own()
                self.write_config(config)
            yield lock

    @contextmanager
    def claim_run(self) -> Iterator[WriterLock]:
        """Hold the lock of a folder that a run was started in, as `claim` does.

        Raises:
            CheckpointError: Something that the run would write to is a link; nothing was changed.
        """
        self.read_config()  # a folder that is no run's is left as it is
        self._refuse_links()
        with self.claim() as lock:
            yield lock

    def read_config(self) -> dict[str, Any]:
        """Return the settings of an existing run."""
        if not os.path.isdir(self.path):
            what = "is a file, not" if os.path.exists(self.path) else "is not there, so it is not"
            raise UsageError(
                f"{self.path} {what} a run folder; give the --out of a run that was started"
            )
        path = self.path / SETTINGS
        try:
            data = read_document(path)
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} is not a run folder (it has no config.yaml); "
                "give the --out of a run that was started"
            ) from None
        except (OSError, ConfigError) as error:
            reason = reason_of(error)
            raise CheckpointError(f"{path} cannot be read: {reason}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} is not a mapping of settings; the run cannot continue")
        return data

    def read_run_config(self) -> dict[str, Any]:
        """Return the settings of an existing growing or training run; refuse any other folder."""
        settings = self.read_config()
        if COMMAND in settings:
            verb = f"esper {settings[COMMAND]}"
            raise UsageError(
                f"{self.path} is a folder of `{verb}`; continue it with: "
                f"{verb} --resume --out {shlex.quote(str(self.path))}"
            )
        return settings

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the settings, in the place of those that were there."""
        atomic_write_text(self.path / SETTINGS, dump_settings(config))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write what came out of a run that is done, and note that it is."""
        atomic_write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.log("finished")

    def log(self, line: str) -> None:
        """Append one line with the time to log.txt."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
        # The lock's own folder: another one may lie under this name by now.
        folder = None if self._lock is None else self._lock.folder
        try:
            with append_to(self.path / "log.txt", folder=folder) as file:
                file.write(f"{stamp} {line}\n".encode())
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / 'log.txt'}: {error.strerror}; free some space or make "
                "the folder writable, then continue with --resume"
            ) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except EsperError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"cannot create the run folder {self.path}: {reason}; "
                "give a folder you may write to with --out"
            ) from None

    def _refuse_taken(self, overwrite: bool) -> None:
        """Refuse a folder in which something is that may not be replaced."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give a folder for the run with --out")
        if not self.path.exists() or all(_is_nothing(entry.name) for entry in self.path.iterdir()):
            return
        if not self.is_run:
            raise UsageError(
                f"{self.path} is not empty and no run folder; give another folder with --out"
            )
        if not overwrite:
            raise UsageError(
                f"{self.path} is not empty; continue it with --resume, replace it with "
                "--overwrite, or give another folder with --out (in Python: resume=True, "
                "overwrite=True, out=...)"
            )

    def _refuse_links(self) -> None:
        """Raise where a link lies among what a run writes: a sent folder may point anywhere."""
        waiting = [self.path / name for name in (*_OWN, *STORE_FILES)]
        while waiting:
            item = waiting.pop()
            refuse_link(item)
            # What cannot be looked into cannot be written to either.
            with contextlib.suppress(OSError):
                waiting += [item / name for name in os.listdir(item)]

    def _remove_own(self) -> None:
        """Remove what a run writes, and nothing else that may lie there."""
        for name in _OWN:
            item = self.path / name
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)


def _is_nothing(name: str) -> bool:
    """Return whether a start that was killed may have left this in an empty folder."""
    return name == LOCK_FILE or name.startswith(f".{SETTINGS}.tmp-")


def dump_settings(config: Mapping[str, Any]) -> str:
    """Return settings as the text of `config.yaml`."""
    import yaml

    text: str = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return text
