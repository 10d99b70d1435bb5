"""A run folder: settings, log and checkpoints.

`config.yaml` is complete and resolved; `log.txt` has one line per entry; checkpoints, the store and
the files of sinks lie beside them. An existing run is overwritten only on request, and files that
no run wrote are never removed. A writer holds the folder's lock from its first change to its last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from esper.leyline.errors import (
    CheckpointError,
    ConfigError,
    EsperError,
    UsageError,
    option,
    reason_of,
)
from esper.nissa.database import LOCK_FILE, STORE_FILES
from esper.nissa.listing import COMMAND
from esper.utils.files import WriterLock, append_to, atomic_write_text, refuse_link, sync_folder
from esper.utils.manifest import MANIFEST_FILE, Manifest, refuse_other
from esper.utils.manifest import read_manifest as read_state_manifest
from esper.utils.settings import read_document

SETTINGS = "config.yaml"
CHECKPOINTS = "checkpoints"
"""Where checkpoints lie in a run folder."""

# The settings are removed last: while they exist, the folder counts as a run. The lock file stays,
# or two processes could lock two files of the same name.
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
    "tables.json",
    "tables.md",
    "ratios.jsonl",
    "schedule.json",
    "lessons.json",
    "privileged.json",
    "contextual.json",
    "split1.json",
    "split2.json",
    "depth_privileged.json",
    "depth_contextual.json",
    "depth_split1.json",
    "depth_split2.json",
    "heuristic.json",
    "tb",
    *(name for name in STORE_FILES if name != LOCK_FILE),
    SETTINGS,
)


class RunFolder:
    """Creates one run folder, reads its settings and writes its log."""

    def __init__(self, path: str | Path) -> None:
        """Set the path; nothing is created yet."""
        self.path = Path(path)
        self._lock: WriterLock | None = None

    @property
    def is_run(self) -> bool:
        """Whether a run was started here."""
        return os.path.isfile(self.path / SETTINGS)

    @contextmanager
    def claim(self) -> Iterator[WriterLock]:
        """Take the lock of the folder; release it only if the block fails.

        What is opened in the block keeps the lock.

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
        """Create the folder with these settings and take its lock, as `claim` does.

        Raises:
            UsageError: The folder holds a run or other files, or cannot be created.
            CheckpointError: Another process writes to the folder, which stays as it is.
        """
        with self._explained():
            self._refuse_taken(overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
        with self.claim() as lock:
            with self._explained():
                # Another process may have started a run before the lock was taken.
                self._refuse_taken(overwrite)
                self._remove_own()
                self.write_config(config)
            yield lock

    @contextmanager
    def claim_run(self) -> Iterator[WriterLock]:
        """Take the lock of an existing run, as `claim` does.

        Raises:
            CheckpointError: A file that the run would write is a link; nothing was changed.
        """
        self.read_config()  # refuses a folder without a run
        self._refuse_links()
        with self.claim() as lock:
            yield lock

    def read_config(self) -> dict[str, Any]:
        """Return the settings of an existing run."""
        if not os.path.isdir(self.path):
            what = "is a file, not" if os.path.exists(self.path) else "is not there, so it is not"
            raise UsageError(
                f"{self.path} {what} a run folder; give the {option('out')} of a run that was "
                "started"
            )
        path = self.path / SETTINGS
        try:
            data = read_document(path)
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} is not a run folder (it has no config.yaml); "
                f"give the {option('out')} of a run that was started"
            ) from None
        except (OSError, ConfigError) as error:
            reason = reason_of(error)
            raise CheckpointError(f"{path} cannot be read: {reason}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} is not a mapping of settings; the run cannot continue")
        return data

    def read_run_config(self) -> dict[str, Any]:
        """Return the settings of a growing or training run; refuse other folders."""
        settings = self.read_config()
        if COMMAND in settings:
            verb = f"esper {settings[COMMAND]}"
            raise UsageError(
                f"{self.path} is a folder of `{verb}`; continue it with: "
                f"{verb} --resume --out {shlex.quote(str(self.path))}"
            )
        return settings

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write or replace the settings."""
        atomic_write_text(self.path / SETTINGS, dump_settings(config))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run, and log its end."""
        atomic_write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.log("finished")

    def log(self, line: str) -> None:
        """Append one line with the time to log.txt."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
        # The folder of the lock: another folder may have this name by now.
        folder = None if self._lock is None else self._lock.folder
        try:
            with append_to(self.path / "log.txt", folder=folder) as file:
                file.write(f"{stamp} {line}\n".encode())
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / 'log.txt'}: {error.strerror}; free some space or make "
                f"the folder writable, then continue with {option('resume')}"
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
                f"give a folder you may write to with {option('out')}"
            ) from None

    def _refuse_taken(self, overwrite: bool) -> None:
        """Refuse a folder whose content may not be replaced."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(
                f"{self.path} is a file; give a folder for the run with {option('out')}"
            )
        if not self.path.exists() or all(_is_nothing(entry.name) for entry in self.path.iterdir()):
            return
        if not self.is_run:
            raise UsageError(
                f"{self.path} is not empty and no run folder; give another folder with "
                f"{option('out')}"
            )
        if not overwrite:
            raise UsageError(
                f"{self.path} is not empty; continue it with {option('resume')}, replace it with "
                f"{option('overwrite')}, or give another folder with {option('out')}"
            )

    def _refuse_links(self) -> None:
        """Raise if a file that a run writes is a link, which may lead out of the folder."""
        waiting = [self.path / name for name in (*_OWN, *STORE_FILES)]
        while waiting:
            item = waiting.pop()
            refuse_link(item)
            # A folder that cannot be read cannot be written either.
            with contextlib.suppress(OSError):
                waiting += [item / name for name in os.listdir(item)]

    def _remove_own(self) -> None:
        """Remove the files of a run, and no others."""
        for name in _OWN:
            item = self.path / name
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)


def _is_nothing(name: str) -> bool:
    """Return whether a file may be left by a start that was killed."""
    return name == LOCK_FILE or name.startswith(f".{SETTINGS}.tmp-")


def dump_settings(config: Mapping[str, Any]) -> str:
    """Return settings as the text of `config.yaml`."""
    import yaml

    text: str = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return text


# ---- Checkpoints: the latest, the previous, and the best result


Which = Literal["latest", "previous"]
"""The checkpoints a run can be continued from."""

Write = Callable[[Path], None]
"""Creates a folder and writes into it."""

_STATE = "state"
_SAVING = ".saving-"
_OLD = ".old-"


@dataclass(frozen=True, slots=True)
class RunKind:
    """A kind of run: its saved format and the command that continues it."""

    name: str
    version: int
    command: str


GROWING = RunKind("growing run", 7, "esper grow")
TRAINING = RunKind("training run", 5, "esper train")


class Checkpoints:
    """Saves and loads the checkpoints of one run.

    Args:
        run: The run folder.
        kind: The kind of run.
    """

    def __init__(self, run: str | Path, kind: RunKind) -> None:
        """Set the paths; nothing is created yet."""
        self.run = Path(run)
        self.kind = kind
        self.folder = self.run / CHECKPOINTS

    @property
    def latest(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "latest"

    @property
    def previous(self) -> Path:
        """The checkpoint before the newest."""
        return self.folder / "previous"

    @property
    def best(self) -> Path:
        """The best result so far."""
        return self.folder / "best"

    def save(
        self,
        state: dict[str, Any],
        meta: Mapping[str, Any],
        parts: Mapping[str, Write] | None = None,
    ) -> None:
        """Save a checkpoint as the latest; the one that was becomes the previous.

        Args:
            state: Everything needed to continue exactly.
            meta: Facts for the manifest.
            parts: Writers of further parts, by the name of their folder.
        """
        from esper.utils.storage import save_tree

        try:
            refuse_link(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            fresh = self.folder / f"{_SAVING}{os.getpid()}-{secrets.token_hex(4)}"
            fresh.mkdir()
            for name, write in (parts or {}).items():
                write(fresh / name)
            # The state is written last: if it is complete, so is the checkpoint.
            save_tree(
                fresh / _STATE, state, kind=self.kind.name, version=self.kind.version, meta=meta
            )
            self._put_in_place(fresh)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self.folder}: {error.strerror or error}; the last "
                "one is untouched; free some space or make the folder writable, then continue "
                f"with {option('resume')}"
            ) from error

    def load(self, which: Which = "latest") -> dict[str, Any] | None:
        """Return the state of a checkpoint, None if the run has none yet.

        Raises:
            CheckpointError: It is damaged or foreign; the message names another checkpoint to
                continue from, if there is one.
        """
        self._tidy()
        place = self.folder / which
        if not place.exists() and not self.previous.exists():
            return None
        try:
            return self._load(place)
        except CheckpointError as error:
            if which != "latest" or not self._is_whole(self.previous):
                raise
            raise CheckpointError(
                f"{error}; the checkpoint before it ({self.previous}) is whole, continue from it "
                f"with: {resume_command(self.run, self.kind, 'previous')}"
            ) from error

    def refuse_other_format(self) -> None:
        """Raise if another version of Esper wrote the newest checkpoint."""
        if self.latest.exists():
            refuse_other(read_manifest(self.latest), self.kind.name, self.kind.version)

    def _load(self, place: Path) -> dict[str, Any]:
        from esper.utils.storage import load_tree

        if place.exists() and not (place / _STATE).exists():
            if (place / MANIFEST_FILE).exists():
                # An older format; its manifest raises the error.
                read_state_manifest(place)
            raise CheckpointError(
                f"{place} is no checkpoint of a {self.kind.name}: it has no folder {_STATE!r}"
            )
        state, _ = load_tree(place / _STATE, kind=self.kind.name, version=self.kind.version)
        return state

    def _is_whole(self, place: Path) -> bool:
        try:
            self._load(place)
        except CheckpointError:
            return False
        return True

    def _put_in_place(self, fresh: Path) -> None:
        """Rename a complete checkpoint to latest, and latest to previous."""
        old = self.folder / f"{_OLD}{os.getpid()}-{secrets.token_hex(4)}"
        if self.latest.exists():
            if self.previous.exists():
                os.rename(self.previous, old)
            os.rename(self.latest, self.previous)
        os.rename(fresh, self.latest)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _tidy(self) -> None:
        """Finish or remove a save that was killed."""
        if not self.folder.is_dir():
            return
        for entry in sorted(self.folder.iterdir()):
            if entry.name.startswith(_SAVING):
                is_complete = (entry / _STATE / MANIFEST_FILE).is_file()
                if is_complete and not self.latest.exists():
                    os.rename(entry, self.latest)
                    continue
            elif not entry.name.startswith(_OLD):
                continue
            with contextlib.suppress(OSError):
                shutil.rmtree(entry)


def read_manifest(path: str | Path) -> Manifest:
    """Return the manifest of a saved state, without loading PyTorch.

    Args:
        path: A saved garden, policy or population, a checkpoint, or a run (its latest checkpoint).

    Raises:
        CheckpointError: There is no saved state, its manifest is damaged, or another version of
            Esper laid it out.
    """
    path = Path(path)
    places = (path, path / _STATE, path / CHECKPOINTS / "latest" / _STATE)
    found = next((place for place in places if os.path.isfile(place / MANIFEST_FILE)), path)
    return read_state_manifest(found)


def resume_command(
    run: str | Path, kind: RunKind, which: Which = "latest", *, model: str | None = None
) -> str:
    """Return the command that continues a run; `model` is a model of the user."""
    source = "" if which == "latest" else f" --from {which}"
    code = "" if model is None else f" --model {shlex.quote(model)}"
    return f"{kind.command} --resume{source}{code} --out {shlex.quote(str(run))}"
