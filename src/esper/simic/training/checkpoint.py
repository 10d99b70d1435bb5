"""Checkpoints of a training run: the latest, the one before it, and the best policy.

    checkpoints/latest/{policy,state}     everything to go on exactly
    checkpoints/previous/{policy,state}   what `latest` was before
    checkpoints/best                      the policy with the best greedy episodes so far

Each folder inside is written by `leyline.storage`: checksummed, versioned, without code to run. A
checkpoint is put in place by renaming, so a kill leaves the old one or the new one. A checkpoint's
`policy`, and `best`, are policies as `tamiyo` saves them: either is a controller.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from esper.leyline.errors import CheckpointError
from esper.leyline.storage import MANIFEST_FILE, load_tree, save_tree, sync_folder
from esper.nissa.folder import CHECKPOINTS
from esper.tamiyo.controllers.policy_file import CHECKPOINT_POLICY, Policy, save_policy

KIND = "training run"
VERSION = 2

Which = Literal["latest", "previous"]
"""The checkpoints a run can be continued from."""

_STATE = "state"
_SAVING = ".saving-"
_OLD = ".old-"


class Checkpoints:
    """Saves and loads the checkpoints of one run.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: str | Path) -> None:
        """Look at a run; nothing is created yet."""
        self.run = Path(run)
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
        """The best policy so far."""
        return self.folder / "best"

    def save(self, state: dict[str, Any], policy: Policy, meta: Mapping[str, Any]) -> None:
        """Save a checkpoint as the latest; the one that was becomes the previous."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            fresh = self.folder / f"{_SAVING}{os.getpid()}-{secrets.token_hex(4)}"
            fresh.mkdir()
            save_policy(fresh / CHECKPOINT_POLICY, policy, meta=meta)
            # The state comes last: where it is complete, the checkpoint is.
            save_tree(fresh / _STATE, state, kind=KIND, version=VERSION, meta=meta)
            self._put_in_place(fresh)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self.folder}: {error.strerror or error}; the last "
                "one is untouched; free some space or make the folder writable, then --resume"
            ) from error

    def save_best(self, policy: Policy, meta: Mapping[str, Any]) -> None:
        """Save a policy as the best."""
        save_policy(self.best, policy, meta=meta)

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
                f"with: {resume_command(self.run, 'previous')}"
            ) from error

    def _load(self, place: Path) -> dict[str, Any]:
        if place.exists() and not (place / _STATE).exists():
            raise CheckpointError(
                f"{place} is no checkpoint of a training run: it has no folder {_STATE!r}"
            )
        state, _ = load_tree(place / _STATE, kind=KIND, version=VERSION)
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


def resume_command(run: str | Path, which: Which = "latest") -> str:
    """Return the command that continues a run."""
    source = "" if which == "latest" else f" --from {which}"
    return f"esper train --resume{source} --out {shlex.quote(str(run))}"
