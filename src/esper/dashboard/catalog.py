"""Which runs a page may show: those below one folder, under names that are no paths.

A request names a run; the name is looked up among the runs that were found, and never becomes a
path by itself. What is not below the folder cannot be asked for.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from esper.nissa.columns import storable_text
from esper.nissa.listing import RESULTS, RunEntry, find_runs

FRESH_S = 2.0
"""How long a list of runs is told again before the folder is looked through anew."""


class Catalog:
    """The runs at or below a folder, looked up by name.

    Args:
        root: a run folder, or one that holds runs.
        fresh_s: how long a list is told again.
    """

    def __init__(self, root: Path, *, fresh_s: float = FRESH_S) -> None:
        """Look at nothing yet."""
        self.root = root
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._found: dict[str, RunEntry] = {}
        self._looked = -float("inf")

    def entries(self) -> dict[str, RunEntry]:
        """Return every run by name, the one written last first; damaged ones are among them."""
        with self._lock:
            if time.monotonic() - self._looked > self._fresh_s:
                # Searches, clones and proofs have no store, and so nothing to show.
                found = [run for run in find_runs(self.root) if run.kind not in RESULTS]
                self._found = {self._name(entry.path): entry for entry in found}
                self._looked = time.monotonic()
            return self._found

    def folder(self, name: str) -> Path | None:
        """Return the folder of a run that is there, None for any other name."""
        known = self._found.get(name)
        if known is None:
            known = self.entries().get(name)
        return None if known is None else known.path

    def _name(self, path: Path) -> str:
        return storable_text(path.relative_to(self.root).as_posix())
