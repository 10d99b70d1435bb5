"""Checkpoints of a run: the latest, the one before it, and the best of what the run makes.

    checkpoints/latest/state      everything to go on exactly
    checkpoints/latest/policy     of a training run: its policy, which is a controller
    checkpoints/previous/...      what `latest` was before
    checkpoints/best              the best network of a growing run, or policy of a training run

Growing and training runs have the same layout. Each folder inside is written by `leyline.storage`:
checksummed, versioned, without code to run. A checkpoint is put in place by renaming, so a kill
leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from esper.leyline.errors import CheckpointError
from esper.leyline.files import refuse_link, sync_folder
from esper.leyline.manifest import MANIFEST_FILE, Manifest, refuse_other
from esper.leyline.manifest import read_manifest as read_state_manifest
from esper.runs.folder import CHECKPOINTS

Which = Literal["latest", "previous"]
"""The checkpoints a run can be continued from."""

Write = Callable[[Path], None]
"""Writes something into a folder that it makes."""

_STATE = "state"
_SAVING = ".saving-"
_OLD = ".old-"


@dataclass(frozen=True, slots=True)
class RunKind:
    """What is saved of a run, and who continues it."""

    name: str
    version: int
    command: str


GROWING = RunKind("growing run", 6, "esper grow")
TRAINING = RunKind("training run", 5, "esper train")


class Checkpoints:
    """Saves and loads the checkpoints of one run.

    Args:
        run: folder of the run.
        kind: what it is a run of.
    """

    def __init__(self, run: str | Path, kind: RunKind) -> None:
        """Look at a run; nothing is created yet."""
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
        """The best of what the run has made so far."""
        return self.folder / "best"

    def save(
        self,
        state: dict[str, Any],
        meta: Mapping[str, Any],
        parts: Mapping[str, Write] | None = None,
    ) -> None:
        """Save a checkpoint as the latest; the one that was becomes the previous.

        Args:
            state: everything to go on exactly.
            meta: what the manifest says of it.
            parts: what else a checkpoint holds, by the name of its folder.
        """
        from esper.leyline.storage import save_tree

        try:
            refuse_link(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            fresh = self.folder / f"{_SAVING}{os.getpid()}-{secrets.token_hex(4)}"
            fresh.mkdir()
            for name, write in (parts or {}).items():
                write(fresh / name)
            # The state comes last: where it is complete, the checkpoint is.
            save_tree(
                fresh / _STATE, state, kind=self.kind.name, version=self.kind.version, meta=meta
            )
            self._put_in_place(fresh)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self.folder}: {error.strerror or error}; the last "
                "one is untouched; free some space or make the folder writable, then --resume"
            ) from error

    def load(self, which: Which = "latest") -> dict[str, Any] | None:
        """Return the state of a checkpoint, None where the run has none yet.

        Raises:
            CheckpointError: It is damaged or foreign; one line says why, and what to continue
                from instead where there is something.
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
        """Raise where the newest checkpoint is one that another version of Esper goes on from."""
        if self.latest.exists():
            refuse_other(read_manifest(self.latest), self.kind.name, self.kind.version)

    def _load(self, place: Path) -> dict[str, Any]:
        from esper.leyline.storage import load_tree

        if place.exists() and not (place / _STATE).exists():
            if (place / MANIFEST_FILE).exists():
                # One folder with everything in it, as it was once.
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
        """Rename a complete checkpoint into place, and the others out of its way."""
        old = self.folder / f"{_OLD}{os.getpid()}-{secrets.token_hex(4)}"
        if self.latest.exists():
            if self.previous.exists():
                os.rename(self.previous, old)
            os.rename(self.latest, self.previous)
        os.rename(fresh, self.latest)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _tidy(self) -> None:
        """Finish or clear away what a killed save has left."""
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
    """Return what a saved state says of itself, without loading it or PyTorch.

    Args:
        path: a saved garden, policy or population; a checkpoint; or a run, which means its latest
            checkpoint.

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
    """Return the command that continues a run, of somebody's own model where one is named."""
    source = "" if which == "latest" else f" --from {which}"
    code = "" if model is None else f" --model {shlex.quote(model)}"
    return f"{kind.command} --resume{source}{code} --out {shlex.quote(str(run))}"
