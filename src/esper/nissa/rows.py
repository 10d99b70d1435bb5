"""Rows as they come out of SQLite, turned back into what was recorded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from esper.nissa.columns import TABLES, Row, Table


def decode(table: Table, values: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of one row: flags as booleans, JSON as plain data, NULL as None."""
    row: dict[str, Any] = {}
    for column, value in zip(table.columns, values, strict=True):
        if value is not None and column.is_flag:
            value = bool(value)
        elif value is not None and column.is_json:
            value = json.loads(value)
        row[column.name] = value
    return row


def read_records(
    connection: sqlite3.Connection, table_name: str, condition: str = "", parameters: Any = ()
) -> Iterator[Row]:
    """Return the records of a table in the order of writing; `condition` is SQL of our own."""
    table = TABLES[table_name]
    names = ", ".join(f'"{name}"' for name in table.names)
    query = f'SELECT {names} FROM "{table_name}" {condition} ORDER BY id'
    for values in connection.execute(query, parameters):
        yield table.record(**decode(table, values))
