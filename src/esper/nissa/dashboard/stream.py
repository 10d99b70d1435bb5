"""Server-sent events: what is new in a run, for an open page.

The id of an event is the last row id of each table. A browser that lost the connection sends the
last id it saw and gets exactly the later rows, from this server or a new one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from esper.leyline.errors import EsperError, reason_of
from esper.nissa.columns import TABLES
from esper.nissa.database import STORE_FILE, StoreError, TimeLimit
from esper.nissa.listing import RunEntry
from esper.nissa.reader import StoredRun, open_run
from esper.nissa.report.markup import visible
from esper.nissa.report.page import flatten
from esper.nissa.report.panels import TIMEOUT_S, Points, ask, panels_for, read_new, series_for

# ---- The top of a run's page: settings, progress, alarms


MOST_ALARMS = 200

REQUEST_S = 10.0
"""Time limit of all queries of one request."""

_BUSY_S = 1.0
_PACE = 10
"""Rounds or epochs from which the time left is estimated."""


_visible_name = functools.lru_cache(maxsize=4_096, typed=True)(visible)
"""Cached, because all rows of an answer have the same names."""


def plain(value: Any) -> Any:
    """Return data as strict JSON: numbers that are not finite are None, text is printable."""
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
    """Open the store of a run for one request, with time limits.

    Args:
        folder: The run folder.
        is_over: Returns True when the server has to stop.

    Raises:
        StoreError: There is no store, it cannot be read, or it is a link, which may lead out of the
            folder whose runs are shown.
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
    """Return settings, progress, panels and alarms of a run."""
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
    """Return whether a run grows in depth instead of seeds, by its settings."""
    growth = config.get("growth") if isinstance(config, Mapping) else None
    return isinstance(growth, Mapping) and growth.get("deepen") is not None


def read_kind(run: StoredRun) -> str:
    """Return the kind of a run: grow or train."""
    return str(ask(run, "SELECT kind FROM runs LIMIT 1")[0]["kind"])


def read_progress(run: StoredRun) -> dict[str, Any]:
    """Return the progress of a run and the estimated time left."""
    entry = run.entry
    scores = ("val_score", "val_gain", "test_score", "test_gain")
    names = ("state", "kind", "done", "planned", "unit", *scores, "note", "age_s")
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
    """Return the latest alarms, newest first, each with whether it is still active."""
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
    """Return the recorded episodes: first and last round, and the rows of the last."""
    if kind != "train":
        return {"first": 0, "last": 0, "rows": [0]}
    # Two subqueries, because SQLite uses the index for MIN or MAX, not for both at once.
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


PAUSE_S = 1.0
"""Time between two checks of a run."""

HEARTBEAT_S = 10.0
"""Longest time between two messages, so that a lost connection is noticed."""

QUIET_S = 3.0
"""How often the state of a run that writes nothing is checked."""

SHARE = 0.01
"""Largest share of its time that a stream spends reading; a slow store is read less often."""

LONGEST_PAUSE_S = 3.0

SLOW_S = 2.0
"""A store that fails after longer than this is read again only once it has changed."""

MOST_ROWS = 2_000
"""Rows of a table in one event; the rest follows at once."""

WATCHED = tuple(name for name in TABLES if name != "runs")


@dataclass(frozen=True, slots=True)
class Position:
    """How much of a run a page has seen."""

    store: str
    """Changes when the store is replaced, or rolled back to a checkpoint."""
    rows: tuple[int, ...]
    """The last id of every watched table."""

    def __str__(self) -> str:
        return ".".join([self.store, *map(str, self.rows)])

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """Return the position in a text, None if it is not one."""
        store, *rows = text.split(".")
        if len(rows) != len(WATCHED) or not all(row.isdecimal() for row in rows):
            return None
        return cls(store, tuple(int(row) for row in rows))


def read_position(run: StoredRun) -> Position:
    """Return the current position of a run."""
    ids = ", ".join(
        f'(SELECT COALESCE(MAX(id), 0) FROM "{TABLES[name].stored_as}") AS "{name}"'
        for name in WATCHED
    )
    found = ask(run, f"SELECT run_id, resumes, {ids} FROM runs LIMIT 1")
    if not found:
        raise EsperError("the store holds no run")
    row = found[0]
    store = f"{row['run_id'] or 0}-{row['resumes'] or 0}".replace(".", "")
    return Position(store, tuple(int(row[name]) for name in WATCHED))


def read_change(run: StoredRun, since: Position) -> tuple[Position, dict[str, Any]]:
    """Return the new position of a page that was at `since`, and the changes up to it.

    `left` says that there are more rows than fit into one event.
    """
    now = read_position(run)
    was_cut = any(new < old for new, old in zip(now.rows, since.rows, strict=True))
    if now.store != since.store or was_cut:
        return now, {"reset": True}
    series = {one.table: one for one in series_for(read_kind(run))}
    reached: list[int] = []
    rows: dict[str, Points] = {}
    changed: list[str] = []
    for name, old, new in zip(WATCHED, since.rows, now.rows, strict=True):
        upto = new
        if new > old:
            changed.append(name)
            if name in series:
                upto = min(new, old + MOST_ROWS)
                rows[name] = read_new(run, series[name], old, upto)
        reached.append(upto)
    found: dict[str, Any] = {"rows": rows, "changed": changed}
    if tuple(reached) != now.rows:
        found["left"] = True
    return Position(now.store, tuple(reached)), found


class Watch:
    """One run that a page shows."""

    def __init__(
        self,
        name: str,
        path: Path,
        since: Position | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin after `since`, or at the current position."""
        self.name, self.path = name, path
        self._is_over = is_over
        self._failed: tuple[Any, ...] = ()
        self.position = since
        self._seen: tuple[Any, ...] = ()
        self._sent = ""
        self._asked = -QUIET_S

    def look(self) -> dict[str, Any] | None:
        """Return what is new, None if nothing is.

        An error is sent once, and the store is tried again.
        """
        touched = _touched(self.path)
        if touched == self._seen and time.monotonic() - self._asked < QUIET_S:
            return None
        if touched == self._failed:
            return None  # it would take as long again
        began = time.monotonic()
        is_first = self.position is None
        change: dict[str, Any] = {}
        try:
            with open_shown(self.path, self._is_over) as run:
                if self.position is None:
                    self.position = read_position(run)
                if touched != self._seen:
                    self.position, change = read_change(run, self.position)
                    # Rows that did not fit into this event are read at once.
                    self._seen = () if change.pop("left", False) else touched
                self._asked = time.monotonic()
                progress = read_progress(run)
        except (EsperError, sqlite3.Error, OSError, ValueError, LookupError) as error:
            if time.monotonic() - began > SLOW_S:
                self._failed = touched
            return self._unless_sent({"error": reason_of(error)})
        # The age of a run changes all the time and is not sent as a change.
        lasting = {key: value for key, value in progress.items() if key not in ("age_s", "eta_s")}
        if change.get("changed") or change.get("reset") or is_first:
            self._sent = json.dumps(lasting, sort_keys=True, default=str)
            return {"run": self.name, "progress": progress, **change}
        return self._unless_sent(lasting, progress)

    def _unless_sent(
        self, what: Mapping[str, Any], progress: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        text = json.dumps(what, sort_keys=True, default=str)
        if text == self._sent:
            return None
        self._sent = text
        return {"run": self.name, **({"progress": progress} if progress else what)}


def _touched(path: Path) -> tuple[Any, ...]:
    """Return inode, size and time of the store, which change when it is written to."""
    found: list[tuple[int, ...] | None] = []
    for name in (STORE_FILE, f"{STORE_FILE}-wal"):
        try:
            status = (path / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


async def events(
    watches: Sequence[Watch],
    *,
    is_over: Callable[[], bool] = lambda: False,
    pause_s: float = PAUSE_S,
) -> AsyncIterator[str]:
    """Yield server-sent events as long as somebody listens."""
    yield "retry: 1000\n\n"
    spoken = time.monotonic()
    limiter = anyio.CapacityLimiter(1)
    while not is_over():
        began = time.monotonic()
        for watch in watches:
            found = await anyio.to_thread.run_sync(watch.look, limiter=limiter)
            if found is not None:
                spoken = time.monotonic()
                name = found.pop("run")
                data = json.dumps({"run": name, **plain(found)}, allow_nan=False)
                places = "|".join(str(each.position or "") for each in watches)
                yield f"id: {places}\nevent: change\ndata: {data}\n\n"
        if time.monotonic() - spoken > HEARTBEAT_S:
            spoken = time.monotonic()
            yield "event: alive\ndata: {}\n\n"
        took = time.monotonic() - began
        await asyncio.sleep(min(max(pause_s, took / SHARE), max(pause_s, LONGEST_PAUSE_S)))
