"""From records to rows in SQLite: the values it keeps, and the statements that insert them.

Values are handed to SQLite as they come, which is fast; only where it refuses some are all of them
looked at one by one, and a row that cannot be stored is named.
"""

from __future__ import annotations

import json
import operator
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from esper.nissa.columns import TABLES, Row, Table, json_text, plain_value
from esper.nissa.database import CHECKPOINT_KEPT, StoreError, cannot


@dataclass(frozen=True, slots=True)
class Columns:
    """Many rows of one table, as columns; a value that is no list stands for every row."""

    table: Table
    values: Mapping[str, Any]
    size: int
    time: float


class RowError(StoreError):
    """One row cannot be stored: its key is taken, or a value is of no known kind."""


@lru_cache(maxsize=64)
def _special(table: Table) -> tuple[tuple[int, ...], int | None]:
    """Return where a table has JSON columns, and where the time is, if it has one."""
    names = table.names
    json_columns = tuple(i for i, column in enumerate(table.columns) if column.is_json)
    return json_columns, names.index("time") if "time" in names else None


def encode(table: Table, record: Row, now: float) -> tuple[Any, ...]:
    """Return a record's values in the order of its table, with the time filled in."""
    values = table.values(record)
    json_columns, time_column = _special(table)
    if not json_columns and time_column is None:
        return values
    changed = list(values)
    if time_column is not None and changed[time_column] is None:
        changed[time_column] = now
    for index in json_columns:
        if changed[index] is not None:
            changed[index] = json_text(changed[index])
    return tuple(changed)


def encode_columns(item: Columns) -> list[tuple[Any, ...]]:
    """Return the rows of a table given as columns."""
    table, lists = item.table, []
    for column in table.columns:
        value = item.values.get(column.name, column.default)
        if column.name == "time" and value is None:
            value = item.time
        if column.is_json and isinstance(value, list | tuple):
            value = [None if one is None else json_text(one) for one in value]
        elif column.is_json and value is not None:
            value = json_text(value)
        lists.append(value if isinstance(value, list | tuple) else [value] * item.size)
    return list(zip(*lists, strict=True))


# ------------------------------------------------------------------------------------ statements


@dataclass(frozen=True, slots=True)
class Insert:
    """How a row of one table is inserted."""

    statement: str
    bind: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    """Turns the values of a row into the values of the statement."""


@lru_cache(maxsize=64)
def insert_of(table: Table) -> Insert:
    """Return the INSERT of one row; the ordinal of a numbered table counts up by itself."""
    names = ", ".join(f'"{name}"' for name in table.names)
    marks: list[str] = []
    order: list[int] = []
    for index, column in enumerate(table.columns):
        order.append(index)
        if table.is_numbered and column.name == "ordinal":
            rest = [name for name in table.key if name != "ordinal"]
            same = " AND ".join(f'"{name}" = ?' for name in rest)
            order += [table.names.index(name) for name in rest]
            marks.append(
                "COALESCE(?, (SELECT COALESCE(MAX(ordinal) + 1, 0) "
                f'FROM "{table.stored_as}" WHERE {same}))'
            )
        else:
            marks.append("?")
    statement = f'INSERT INTO "{table.stored_as}" ({names}) VALUES ({", ".join(marks)})'
    return Insert(statement, operator.itemgetter(*order) if table.is_numbered else tuple)


def write_rows(
    connection: sqlite3.Connection, rows: Mapping[str, list[tuple[Any, ...]]], name: str
) -> None:
    """Write rows of several tables in one transaction, or raise with nothing written."""
    try:
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            for table_name, values in rows.items():
                insert_rows(connection, TABLES[table_name], values)
    except sqlite3.Error as error:
        raise cannot(f"write the store {name}", error, CHECKPOINT_KEPT) from error


def insert_rows(connection: sqlite3.Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows within the transaction that is open; raise `StoreError` for one that is wrong."""
    insert = insert_of(table)
    connection.execute("SAVEPOINT quick")
    try:
        connection.executemany(insert.statement, map(insert.bind, rows))
    except (
        sqlite3.InterfaceError,
        sqlite3.ProgrammingError,
        sqlite3.IntegrityError,
        OverflowError,
        UnicodeEncodeError,
    ):
        # Some value is not SQLite's own kind: once more, each value turned into one.
        connection.execute("ROLLBACK TO quick")
        for row in rows:
            _insert_one(connection, table, insert, row)
    connection.execute("RELEASE quick")


def _insert_one(
    connection: sqlite3.Connection, table: Table, insert: Insert, row: tuple[Any, ...]
) -> None:
    try:
        plain = tuple(
            plain_value(value, column) if not column.is_json else value
            for value, column in zip(row, table.columns, strict=True)
        )
        connection.execute(insert.statement, insert.bind(plain))
    except (sqlite3.IntegrityError, OverflowError, TypeError) as error:
        where = ", ".join(f"{name} {row[table.names.index(name)]}" for name in table.key)
        raise RowError(f"the {table.name} row ({where}) cannot be stored: {error}") from error


_STORED: dict[str, type | tuple[type, ...]] = {
    "INTEGER": int,
    "REAL": (float, int),
    "TEXT": str,
}
"""What SQLite gives back; a column of a file that somebody changed may hold anything."""


def decode(table: Table, values: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of one row: flags as booleans, JSON as plain data, NULL as None.

    Raises:
        ValueError: A column holds something else than it is declared to.
    """
    row: dict[str, Any] = {}
    for column, value in zip(table.columns, values, strict=True):
        if value is not None:
            if not isinstance(value, _STORED[column.sql]):
                kind = type(value).__name__
                raise ValueError(f"{table.name}.{column.name} holds {kind}, not {column.sql}")
            if column.is_flag:
                value = bool(value)
            elif column.is_json:
                value = json.loads(str(value))
        row[column.name] = value
    return row


def read_records(
    connection: sqlite3.Connection, table_name: str, condition: str = ""
) -> Iterator[Row]:
    """Return the records of a table in the order of writing; `condition` is SQL of our own."""
    table = TABLES[table_name]
    names = ", ".join(f'"{name}"' for name in table.names)
    query = f'SELECT {names} FROM "{table_name}" {condition} ORDER BY id'
    for values in connection.execute(query):
        yield table.record(**decode(table, values))
