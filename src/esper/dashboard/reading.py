"""What the top of a run's page says: what it is, how far it is, what alarms stand.

Every question opens the file for reading, is answered and forgotten, so that no transaction stays
open and the writer is never kept from tidying up its log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.nissa.columns import TABLES
from esper.nissa.inserts import decode
from esper.nissa.listing import RunEntry, describe_run
from esper.nissa.query import query_run
from esper.report.markup import visible
from esper.report.panels import panels_for, to_mapping
from esper.report.series import TIMEOUT_S, ask

MOST_ALARMS = 200
_PACE = 10
"""Rounds or epochs whose time tells how long the rest will take."""


def plain(value: Any) -> Any:
    """Return data as strict JSON holds it: what is not finite is absent, text is printable."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return visible(value, limit=4_000, keep="\n")
    if isinstance(value, Mapping):
        return {visible(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    return visible(value)


# ------------------------------------------------------------------------------------- a run's top


def read_run(path: Path, name: str) -> dict[str, Any]:
    """Return what a page says of a run before any chart: what it is, how far it is, its alarms."""
    table = TABLES["runs"]
    names = ", ".join(f'"{column}"' for column in table.names)
    rows = query_run(path, f"SELECT {names} FROM runs LIMIT 1", timeout_s=TIMEOUT_S).rows
    run = decode(table, rows[0]) if rows else {}
    kind = str(run.get("kind"))
    config = run.pop("config", None)
    return {
        "name": name,
        "run": run,
        "settings": [[key, value] for key, value in _flatten(config)],
        "progress": read_progress(path),
        "panels": [to_mapping(panel) for panel in panels_for(kind)],
        "alarms": read_alarms(path),
        "episodes": _episodes(path, kind),
    }


def read_progress(path: Path) -> dict[str, Any]:
    """Return how a run stands and how long it may still take."""
    entry = describe_run(path)
    names = ("state", "kind", "done", "planned", "unit", "score", "gain", "note", "age_s")
    left = _time_left(path, entry) if entry.state == "running" else None
    return {**{name: getattr(entry, name) for name in names}, "eta_s": left}


def _time_left(path: Path, entry: RunEntry) -> float | None:
    if not entry.planned or not entry.done:
        return None
    table = "rounds" if entry.kind == "train" else "epochs"
    rows = ask(
        path,
        f"SELECT AVG(seconds) AS pace FROM (SELECT seconds FROM {table} ORDER BY id DESC LIMIT ?)",
        [_PACE],
    )
    pace = rows[0]["pace"]
    return None if pace is None else max(0.0, pace * (entry.planned - entry.done))


def read_alarms(path: Path) -> list[dict[str, Any]]:
    """Return the latest alarms, the newest first, each with whether it still stands."""
    rows = ask(
        path,
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


def _episodes(path: Path, kind: str) -> dict[str, Any]:
    """Return which episodes can be looked into: the rounds, and the rows of the latest."""
    if kind != "train":
        return {"first": 0, "last": 0, "rows": [0]}
    # Two questions in one: an index answers either end, but not both at once.
    found = ask(
        path,
        'SELECT (SELECT MIN("round") FROM decisions) AS first, '
        '(SELECT MAX("round") FROM decisions) AS last',
    )[0]
    if found["last"] is None:
        return {"first": None, "last": None, "rows": []}
    return {**found, "rows": recorded_rows(path, found["last"])}


def recorded_rows(path: Path, round: int) -> list[int]:
    """Return the rows of a round whose decisions were recorded."""
    rows = ask(
        path, 'SELECT DISTINCT "row" FROM decisions WHERE "round" = ? ORDER BY "row"', [round]
    )
    return [row["row"] for row in rows]


def _flatten(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(config, Mapping):
        return []
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found += _flatten(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
