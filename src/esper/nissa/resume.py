"""Watermarks, and going back to one: what a checkpoint knows of the store.

A watermark is the last `id` of every table and the cursor of every sink. It is committed before
its checkpoint is renamed into place and travels inside that checkpoint, so whichever checkpoint a
run continues from, the store can be cut back to exactly what had happened by then.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.nissa.columns import TABLES, plain_data
from esper.nissa.errors import StoreError

_KEPT_MARKS = 64

_RESET = ("note", "ended", "val_score", "test_score", "twin_val_score", "twin_test_score")


def commit_watermark(
    connection: sqlite3.Connection, run_id: str, sinks: Mapping[str, Any]
) -> dict[str, Any]:
    """Commit a watermark durably and return it as plain data."""
    # A checkpoint survives a power cut, so what it refers to must as well.
    connection.execute("PRAGMA synchronous = FULL")
    try:
        connection.execute("BEGIN IMMEDIATE")
        positions = read_positions(connection)
        last = connection.execute("SELECT MAX(number) FROM watermarks").fetchone()[0]
        number = (last or 0) + 1
        connection.execute(
            "INSERT INTO watermarks (number, positions, sinks, time) VALUES (?, ?, ?, ?)",
            (number, json.dumps(positions), json.dumps(plain_data(sinks)), time.time()),
        )
        connection.execute("DELETE FROM watermarks WHERE number <= ?", (number - _KEPT_MARKS,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
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
    connection.execute("BEGIN IMMEDIATE")
    try:
        for name, position in wanted.items():
            connection.execute(f'DELETE FROM "{TABLES[name].stored_as}" WHERE id > ?', (position,))
        connection.execute("DELETE FROM watermarks WHERE number > ?", (number,))
        reset = ", ".join(f"{name} = NULL" for name in (*_RESET, "parameters"))
        connection.execute(
            f"UPDATE runs SET status = 'running', resumes = COALESCE(resumes, 0) + 1, {reset}"
        )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    return sinks


def _check_mark(connection: sqlite3.Connection, path: Path, mark: Mapping[str, Any]) -> None:
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
