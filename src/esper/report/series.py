"""The points of a run's charts, read from its store: short questions, answers of bounded size."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, TypedDict

from esper.nissa.reader import StoredRun
from esper.report.panels import COMPUTED, Series, series_for

TIMEOUT_S = 5.0
MOST_POINTS = 1_500
"""Places on the axis of a chart; more are drawn as the least and the greatest of every few."""


class Points(TypedDict):
    """Rows of one table as charts need them; the first column is the axis."""

    columns: list[str]
    rows: list[list[Any]]
    every: int
    """Places on the axis that were taken together."""


def ask(run: StoredRun, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Answer one question."""
    return run.query(sql, parameters, timeout_s=TIMEOUT_S).to_dicts()


def unfolded(text: Any) -> Any:
    """Return what a JSON column holds, None where it holds none."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_series(
    run: StoredRun, kind: str, between: tuple[int, int] | None = None
) -> dict[str, Points]:
    """Return the points of every chart, table by table, and how many rows make one point.

    Args:
        run: The run.
        kind: What kind of run it is.
        between: The first and the last place on the axis; all of it by default. A part of a long
            run has as many points as the whole, so they lie closer together.
    """
    return {series.table: _read_table(run, _part(series, between)) for series in series_for(kind)}


def read_new(run: StoredRun, series: Series, after: int, upto: int) -> Points:
    """Return the rows of a table that were written after one and up to another."""
    episode = f" AND {series.where}" if series.table == "epochs" else ""
    where = f"id > ? AND id <= ?{episode} ORDER BY id"
    return _rows(run, series, where, [after, upto])


def _part(series: Series, between: tuple[int, int] | None) -> Series:
    if between is None:
        return series
    low, high = map(int, between)
    where = f'({series.where}) AND "{series.x}" BETWEEN {low} AND {high}'
    return dataclasses.replace(series, where=where)


def _read_table(run: StoredRun, series: Series) -> Points:
    span = ask(
        run,
        f'SELECT MIN("{series.x}") AS low, MAX("{series.x}") AS high FROM "{series.table}"'
        f" WHERE {series.where}",
    )[0]
    if span["low"] is None:
        return _rows(run, series, f"{series.where} LIMIT 0", [])
    size = math.ceil((span["high"] - span["low"] + 1) / MOST_POINTS)
    if size <= 1:
        return _rows(run, series, f"{series.where} ORDER BY id", [])
    return _thinned(run, series, size, span["low"])


def _rows(run: StoredRun, series: Series, where: str, parameters: Sequence[Any]) -> Points:
    names = _names(series)
    chosen = ", ".join(f'{_sql(name)} AS "{name}"' for name in names)
    answer = run.query(
        f'SELECT {chosen} FROM "{series.table}" WHERE {where}',
        parameters,
        timeout_s=TIMEOUT_S,
    )
    return {"columns": names, "rows": _decoded(series, names, answer.rows), "every": 1}


def _thinned(run: StoredRun, series: Series, size: int, low: int) -> Points:
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
    answer = run.query(statement, timeout_s=TIMEOUT_S)
    return {"columns": names, "rows": _decoded(series, names, answer.rows), "every": size}


def _names(series: Series) -> list[str]:
    by = [] if series.by is None else [series.by]
    return [series.x, *by, *series.columns, *series.json]


def _sql(name: str) -> str:
    return COMPUTED.get(name, f'"{name}"')


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
