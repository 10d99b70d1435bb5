"""Which runs a page may show: those below one folder, under names that are no paths.

A request names a run; the name is looked up among the runs that were found, and never becomes a
path by itself. What is not below the folder cannot be asked for. Looking a run up opens no store,
so one that is slow to answer keeps only its own page waiting.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from esper.nissa.columns import storable_text
from esper.nissa.database import STORE_FILE
from esper.nissa.listing import (
    LISTING_S,
    RESULTS,
    RunEntry,
    describe_run,
    newest_first,
    run_folders,
)

FRESH_S = 2.0
"""How long a list of runs is told again before the folder is looked through anew."""

SLOW_S = 0.5 * LISTING_S
"""A store that took longer than this is asked again only once it has changed."""


class Catalog:
    """The runs at or below a folder, looked up by name.

    Args:
        root: a run folder, or one that holds runs.
        fresh_s: how long a list is told again.
        is_over: says when the server has to stop, so that a list need not be finished.
    """

    def __init__(
        self,
        root: Path,
        *,
        fresh_s: float = FRESH_S,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Look at nothing yet."""
        self.root = root
        self._fresh_s = fresh_s
        self._is_over = is_over
        self._listing = threading.Lock()
        self._found: dict[str, RunEntry] = {}
        self._looked = -float("inf")
        self._slow: dict[Path, tuple[object, RunEntry]] = {}
        """Stores that keep a list waiting: what they were, and what was told of them."""

    def entries(self) -> dict[str, RunEntry]:
        """Return every run by name, the one written last first; damaged ones are among them."""
        with self._listing:
            if time.monotonic() - self._looked > self._fresh_s:
                # Searches, clones and proofs have no store, and so nothing to show.
                found = [self._describe(folder) for folder in run_folders(self.root)]
                shown = newest_first(run for run in found if run.kind not in RESULTS)
                self._found = {self._name(entry.path): entry for entry in shown}
                self._looked = time.monotonic()
            return self._found

    def folder(self, name: str) -> Path | None:
        """Return the folder of a run that is there, None for any other name."""
        known = self._found.get(name)
        if known is not None:
            return known.path
        return next((path for path in run_folders(self.root) if self._name(path) == name), None)

    def _describe(self, folder: Path) -> RunEntry:
        if self._is_over():
            return RunEntry(path=folder, state="damaged", note="the server stops")
        stamp = _stamp(folder / STORE_FILE)
        if folder in self._slow and self._slow[folder][0] == stamp:
            return self._slow[folder][1]
        began = time.monotonic()
        entry = describe_run(folder)
        self._slow.pop(folder, None)
        if time.monotonic() - began > SLOW_S:
            self._slow[folder] = (stamp, entry)
        return entry

    def _name(self, path: Path) -> str:
        return storable_text(path.relative_to(self.root).as_posix())


def _stamp(path: Path) -> object:
    """Return what changes when a store is written to."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
