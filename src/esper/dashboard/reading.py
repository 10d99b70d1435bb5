"""What charts and headlines need of a store: short questions, answers of bounded size.

Every question opens the file for reading, is answered and forgotten, so that no transaction stays
open and the writer is never kept from tidying up its log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.dashboard.panels import COMPUTED, Series, panels_for, series_for, to_mapping
from esper.nissa.columns import TABLES
from esper.nissa.inserts import decode
from esper.nissa.listing import RunEntry, describe_run
from esper.nissa.query import query_run
from esper.report.markup import visible

TIMEOUT_S = 5.0
MOST_POINTS = 1_500
"""Places on the axis of a chart; more are drawn as the least and the greatest of every few."""

MOST_ALARMS = 200
_PACE = 10
"""Rounds or epochs whose time tells how long the rest will take."""


def ask(path: Path, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Answer one question."""
    return query_run(path, sql, parameters, timeout_s=TIMEOUT_S).to_dicts()


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


def unfolded(text: Any) -> Any:
    """Return what a JSON column holds, None where it holds none."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
    told: dict[str, Any] = {
        "state": entry.state,
        "kind": entry.kind,
        "done": entry.done,
        "planned": entry.planned,
        "unit": entry.unit,
        "score": entry.score,
        "gain": entry.gain,
        "note": entry.note,
        "age_s": entry.age_s,
        "eta_s": None,
    }
    if entry.state == "running":
        told["eta_s"] = _time_left(path, entry)
    return told


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
    found = ask(path, 'SELECT MIN("round") AS first, MAX("round") AS last FROM decisions')[0]
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


# ------------------------------------------------------------------------------------------ series


def read_series(path: Path, kind: str) -> dict[str, Any]:
    """Return the points of every chart, table by table, and how many rows make one point."""
    return {series.table: _read_table(path, series) for series in series_for(kind)}


def read_new(path: Path, series: Series, after: int, upto: int) -> dict[str, Any]:
    """Return the rows of a table that were written after one and up to another."""
    where = f"id > ? AND id <= ?{_episode(series)} ORDER BY id"
    return _rows(path, series, where, [after, upto])


def _episode(series: Series) -> str:
    return f" AND {series.where}" if series.table == "epochs" else ""


def _read_table(path: Path, series: Series) -> dict[str, Any]:
    span = ask(
        path,
        f'SELECT MIN("{series.x}") AS low, MAX("{series.x}") AS high FROM "{series.table}"'
        f" WHERE {series.where}",
    )[0]
    if span["low"] is None:
        return _rows(path, series, f"{series.where} LIMIT 0", [])
    size = math.ceil((span["high"] - span["low"] + 1) / MOST_POINTS)
    if size <= 1:
        return {**_rows(path, series, f"{series.where} ORDER BY id", []), "every": 1}
    return {**_thinned(path, series, size, span["low"]), "every": size}


def _rows(path: Path, series: Series, where: str, parameters: Sequence[Any]) -> dict[str, Any]:
    names = _names(series)
    chosen = ", ".join(_expression(name) for name in names)
    answer = query_run(
        path,
        f'SELECT {chosen} FROM "{series.table}" WHERE {where}',
        parameters,
        timeout_s=TIMEOUT_S,
    )
    return {"columns": names, "rows": _decoded(series, names, answer.rows)}


def _thinned(path: Path, series: Series, size: int, low: int) -> dict[str, Any]:
    """Return two rows for every few: all the least values at its start, all the greatest after.

    What stands out in any column is thus seen in its chart, and a band keeps its whole width.
    """
    names = _names(series)
    fixed = {series.x, series.by, *series.json}
    groups = f'("{series.x}" - {int(low)}) / {int(size)}'
    if series.by is not None:
        groups += f', "{series.by}"'
    halves = []
    for extreme in ("MIN", "MAX"):
        chosen = ", ".join(
            f"{extreme}({_sql(name)})" if name == series.x or name not in fixed else f'"{name}"'
            for name in names
        )
        halves.append(
            f'SELECT {chosen} FROM "{series.table}" WHERE {series.where} GROUP BY {groups}'
        )
    statement = f"{' UNION ALL '.join(halves)} ORDER BY 1"
    answer = query_run(path, statement, timeout_s=TIMEOUT_S)
    return {"columns": names, "rows": _decoded(series, names, answer.rows)}


def _names(series: Series) -> list[str]:
    by = [] if series.by is None else [series.by]
    return [series.x, *by, *series.columns, *series.json]


def _sql(name: str) -> str:
    return COMPUTED.get(name, f'"{name}"')


def _expression(name: str) -> str:
    return f'{_sql(name)} AS "{name}"'


def _decoded(
    series: Series, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> list[list[Any]]:
    places = [names.index(name) for name in series.json]
    found = []
    for row in rows:
        values = list(row)
        for place in places:
            values[place] = unfolded(values[place])
        found.append(values)
    return found
