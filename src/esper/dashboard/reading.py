"""What the top of a run's page says: what it is, how far it is, what alarms stand.

A run is opened for one answer of the server and closed again: what is read together shares the
file, and the last to let go of it is the writer, which then tidies up its log.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.nissa.database import STORE_FILE, StoreError
from esper.nissa.limits import TimeLimit
from esper.nissa.listing import RunEntry
from esper.nissa.reader import StoredRun, open_run
from esper.report.markup import visible
from esper.report.page import flatten
from esper.report.panels import panels_for
from esper.report.series import TIMEOUT_S, ask

MOST_ALARMS = 200

REQUEST_S = 10.0
"""How long all questions of one answer may take together."""

_BUSY_S = 1.0
_PACE = 10
"""Rounds or epochs whose time tells how long the rest will take."""


_visible_name = functools.lru_cache(maxsize=4_096, typed=True)(visible)
"""Every row of an answer has the names of the row before."""


def plain(value: Any) -> Any:
    """Return data as strict JSON holds it: what is not finite is absent, text is printable."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return visible(value, limit=4_000, keep="\n")
    if isinstance(value, Mapping):
        return {_visible_name(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return visible(value)


@contextmanager
def open_shown(folder: Path, is_over: Callable[[], bool]) -> Iterator[StoredRun]:
    """Open the store of a run for one answer of the server, within limits of time.

    Args:
        folder: the run.
        is_over: says when the server has to stop.

    Raises:
        StoreError: There is no store, it cannot be read, or it is a link: what that leads to may
            lie outside the folder whose runs are shown.
    """
    if os.path.islink(folder / STORE_FILE):
        raise StoreError(f"{STORE_FILE} of this run is a link; put the store itself there")
    until = time.monotonic() + REQUEST_S
    limit = TimeLimit(TIMEOUT_S, lambda: not is_over() and time.monotonic() < until)
    try:
        with open_run(folder, limit=limit, busy_timeout_s=_BUSY_S) as run:
            yield run
    except BrokenPipeError:
        raise StoreError("the store of this run took too long to answer") from None


# ------------------------------------------------------------------------------------- a run's top


def read_run(run: StoredRun, name: str) -> dict[str, Any]:
    """Return what a page says of a run before any chart: what it is, how far it is, its alarms."""
    row = next(iter(run.rows("runs", limit=1)), {})
    kind = str(row.get("kind"))
    config = row.pop("config", None)
    grows = "blocks" if is_deepened(config) else "seeds"
    return {
        "label": visible(name),
        "run": row,
        "settings": list(map(list, flatten(config if isinstance(config, Mapping) else {}))),
        "progress": read_progress(run),
        "panels": [asdict(panel) for panel in panels_for(kind) if panel.only in (None, grows)],
        "alarms": read_alarms(run),
        "episodes": _episodes(run, kind),
    }


def is_deepened(config: Any) -> bool:
    """Return whether the settings of a run say that blocks wake in it, instead of seeds."""
    growth = config.get("growth") if isinstance(config, Mapping) else None
    return isinstance(growth, Mapping) and growth.get("deepen") is not None


def read_kind(run: StoredRun) -> str:
    """Return what kind of run it is."""
    return str(ask(run, "SELECT kind FROM runs LIMIT 1")[0]["kind"])


def read_progress(run: StoredRun) -> dict[str, Any]:
    """Return how a run stands and how long it may still take."""
    entry = run.entry
    names = ("state", "kind", "done", "planned", "unit", "score", "gain", "note", "age_s")
    left = _time_left(run, entry) if entry.state == "running" else None
    return {**{name: getattr(entry, name) for name in names}, "eta_s": left}


def _time_left(run: StoredRun, entry: RunEntry) -> float | None:
    if not entry.planned or not entry.done:
        return None
    table = "rounds" if entry.kind == "train" else "epochs"
    rows = ask(
        run,
        f"SELECT AVG(seconds) AS pace FROM (SELECT seconds FROM {table} ORDER BY id DESC LIMIT ?)",
        [_PACE],
    )
    pace = rows[0]["pace"]
    return None if pace is None else max(0.0, pace * (entry.planned - entry.done))


def read_alarms(run: StoredRun) -> list[dict[str, Any]]:
    """Return the latest alarms, the newest first, each with whether it still stands."""
    rows = ask(
        run,
        'SELECT id, "round", "row", step, monitor, severity, state, subject, value, threshold, '
        "message, advice FROM alarms ORDER BY id DESC LIMIT ?",
        [MOST_ALARMS],
    )
    settled: set[tuple[Any, ...]] = set()
    for row in rows:
        about = (row["monitor"], row["subject"], row["row"])
        row["stands"] = row["state"] == "raised" and about not in settled
        settled.add(about)
    return rows


def _episodes(run: StoredRun, kind: str) -> dict[str, Any]:
    """Return which episodes can be looked into: the rounds, and the rows of the latest."""
    if kind != "train":
        return {"first": 0, "last": 0, "rows": [0]}
    # Two questions in one: an index answers either end, but not both at once.
    found = ask(
        run,
        'SELECT (SELECT MIN("round") FROM decisions) AS first, '
        '(SELECT MAX("round") FROM decisions) AS last',
    )[0]
    if found["last"] is None:
        return {"first": None, "last": None, "rows": []}
    return {**found, "rows": recorded_rows(run, found["last"])}


def recorded_rows(run: StoredRun, round: int) -> list[int]:
    """Return the rows of a round whose decisions were recorded."""
    rows = ask(
        run, 'SELECT DISTINCT "row" FROM decisions WHERE "round" = ? ORDER BY "row"', [round]
    )
    return [row["row"] for row in rows]
