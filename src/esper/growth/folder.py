"""The folder of a growing run: a run folder with the latest state of one network.

`checkpoints/latest` is replaced atomically, every few seconds and at the end.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from esper.leyline.storage import load_tree, save_tree
from esper.nissa.folder import CHECKPOINTS, RunFolder

KIND = "growing run"
VERSION = 1

_CUT_OFF = ".latest.tmp-"
"""How names of checkpoints begin that were never finished."""


class GrowthFolder(RunFolder):
    """Reads and writes the folder of one growing run."""

    def __init__(self, path: str | Path, *, save_every_s: float = 2.0) -> None:
        """Look at a folder; nothing is created yet."""
        super().__init__(path)
        self._save_every_s = save_every_s
        self._saved_at = -math.inf

    @property
    def checkpoint(self) -> Path:
        """Where the latest state is."""
        return self.path / CHECKPOINTS / "latest"

    def is_due(self) -> bool:
        """Return whether the last checkpoint is a few seconds old, or there is none of this run."""
        return time.monotonic() - self._saved_at >= self._save_every_s

    def save(self, state: dict[str, Any], *, force: bool = False) -> None:
        """Write a checkpoint when it is due, or when forced."""
        if force or self.is_due():
            save_tree(self.checkpoint, state, kind=KIND, version=VERSION)
            self._saved_at = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the latest state, or None when the run stopped before the first one."""
        folder = self.checkpoint.parent
        entries = folder.iterdir() if folder.is_dir() else ()
        if all(entry.name.startswith(_CUT_OFF) for entry in entries):
            return None
        state, _ = load_tree(self.checkpoint, kind=KIND, version=VERSION)
        return state
