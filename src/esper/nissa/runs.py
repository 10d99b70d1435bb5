"""The one row of `runs`: written when a store is made, changed as its run goes on."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from esper.nissa.columns import TABLES, plain_value
from esper.nissa.errors import StoreError
from esper.nissa.inserts import encode, insert_rows
from esper.nissa.rows import decode
from esper.nissa.schema import RunRow


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
    table = TABLES["runs"]
    names = ", ".join(f'"{name}"' for name in table.names)
    row = connection.execute(f"SELECT {names} FROM runs").fetchone()
    if row is None:
        raise StoreError("the store holds no run; it is damaged")
    return RunRow(**decode(table, row))
