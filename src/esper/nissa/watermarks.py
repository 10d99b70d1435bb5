"""What a checkpoint knows of the store: watermarks, going back to one, and the row of the run."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.nissa.columns import TABLES, plain_data, plain_value
from esper.nissa.database import StoreError
from esper.nissa.inserts import encode, insert_rows, read_records
from esper.nissa.schema import RunRow

_KEPT_MARKS = 64

_RESET = ("note", "ended", "val_score", "test_score", "twin_val_score", "twin_test_score")


def commit_watermark(
    connection: sqlite3.Connection, run_id: str, sinks: Mapping[str, Any]
) -> dict[str, Any]:
    """Commit a watermark durably and return it as plain data."""
    # A checkpoint survives a power cut, so what it refers to must as well.
    connection.execute("PRAGMA synchronous = FULL")
    try:
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            positions = read_positions(connection)
            last = connection.execute("SELECT MAX(number) FROM watermarks").fetchone()[0]
            number = (last or 0) + 1
            connection.execute(
                "INSERT INTO watermarks (number, positions, sinks, time) VALUES (?, ?, ?, ?)",
                (number, json.dumps(positions), json.dumps(plain_data(sinks)), time.time()),
            )
            connection.execute("DELETE FROM watermarks WHERE number <= ?", (number - _KEPT_MARKS,))
    finally:
        connection.execute("PRAGMA synchronous = NORMAL")
    return {"run": run_id, "number": number, "positions": positions, "sinks": plain_data(sinks)}


def read_positions(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the last id of every table but `runs`."""
    return {
        table.name: connection.execute(f'SELECT MAX(id) FROM "{table.stored_as}"').fetchone()[0]
        or 0
        for table in TABLES.values()
        if table.name != "runs"
    }


def roll_back(
    connection: sqlite3.Connection, path: Path, mark: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Delete everything beyond a watermark, or everything without one; return sinks' cursors."""
    wanted = dict.fromkeys(read_positions(connection), 0)
    number = 0
    sinks: dict[str, Any] = {}
    if mark is not None:
        _check_mark(connection, path, mark)
        wanted |= mark["positions"]
        number = mark["number"]
        sinks = dict(mark["sinks"])
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for name, position in wanted.items():
            connection.execute(f'DELETE FROM "{TABLES[name].stored_as}" WHERE id > ?', (position,))
        connection.execute("DELETE FROM watermarks WHERE number > ?", (number,))
        reset = ", ".join(f"{name} = NULL" for name in (*_RESET, "parameters"))
        connection.execute(
            f"UPDATE runs SET status = 'running', resumes = COALESCE(resumes, 0) + 1, {reset}"
        )
    return sinks


def _check_shape(path: Path, mark: Mapping[str, Any]) -> None:
    """Refuse a mark that `commit_watermark` would not have made."""
    positions = mark.get("positions")
    is_whole = (
        isinstance(mark.get("number"), int)
        and isinstance(mark.get("sinks"), Mapping)
        and isinstance(positions, Mapping)
        and all(name in TABLES and type(last) is int for name, last in positions.items())
    )
    if not is_whole:
        raise StoreError(
            f"the checkpoint does not say where the store {path} stood; use another copy of it"
        )


def _check_mark(connection: sqlite3.Connection, path: Path, mark: Mapping[str, Any]) -> None:
    _check_shape(path, mark)
    run_id = connection.execute("SELECT run_id FROM runs").fetchone()
    if run_id is None or run_id[0] != mark.get("run"):
        raise StoreError(
            f"{path} belongs to another run than the checkpoint; put the store back that was "
            "beside it, or move this one away to continue without it"
        )
    found = read_positions(connection)
    behind = [name for name, position in mark["positions"].items() if found[name] < position]
    if behind:
        raise StoreError(
            f"{path} holds less than the checkpoint knows (in {', '.join(behind)}); put the store "
            "back that was beside it, or move this one away to continue without it"
        )


def insert_run(connection: sqlite3.Connection, run: RunRow) -> None:
    """Begin a run: give it an id and a time, and write it down as running."""
    table = TABLES["runs"]
    insert_rows(connection, table, [encode(table, run, time.time())])
    created = {"run_id": secrets.token_hex(8), "created": time.time(), "resumes": 0}
    change_run(connection, {**created, "status": "running"})


def change_run(connection: sqlite3.Connection, changes: Mapping[str, Any]) -> None:
    """Set some columns of the run."""
    table = TABLES["runs"]
    assignments = ", ".join(f'"{name}" = ?' for name in changes)
    values = [plain_value(value, table.column(name)) for name, value in changes.items()]
    connection.execute(f"UPDATE runs SET {assignments}", values)


def read_run(connection: sqlite3.Connection) -> RunRow:
    """Return the run as it stands; raise `StoreError` where there is none."""
    row = next(read_records(connection, "runs"), None)
    if not isinstance(row, RunRow):
        raise StoreError("the store holds no run; it is damaged")
    return row
