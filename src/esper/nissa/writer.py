"""The writer thread: takes rows from a bounded queue and commits them to SQLite in batches.

No row is dropped: when the queue is full the producer waits, and the wait is measured. A batch is
committed at most a quarter of a second after its first row (longer only while SQLite is busy), so
that a killed process loses less than a second. Errors of the thread are raised in the producer at
its next call, as one line.
"""

from __future__ import annotations

import json
import operator
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from esper.nissa.columns import TABLES, Row, Table, json_text, plain_value
from esper.nissa.database import StoreError, cannot, checkpoint_kept

# ---- Encoding records as rows, and the statements that insert them


@dataclass(frozen=True, slots=True)
class Columns:
    """Many rows of one table, as columns; a value that is not a list applies to every row."""

    table: Table
    values: Mapping[str, Any]
    size: int
    time: float


class RowError(StoreError):
    """A row cannot be stored: its key exists already, or a value has an unknown type."""


@lru_cache(maxsize=64)
def _special(table: Table) -> tuple[tuple[int, ...], int | None]:
    """Return the indices of the JSON columns of a table, and that of its time."""
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
    """The INSERT of one table."""

    statement: str
    bind: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    """Returns the parameters of the statement for the values of a row."""


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
        raise cannot(f"write the store {name}", error, checkpoint_kept()) from error


def insert_rows(connection: sqlite3.Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows in the open transaction; raise `RowError` for one that is wrong."""
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
        # Some value has a type that SQLite does not know: convert each and try again.
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
"""Types that SQLite returns; in a changed file a column may hold any other."""


def decode(table: Table, values: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of one row: flags as booleans, JSON as plain data, NULL as None.

    Raises:
        ValueError: A column holds a value of another type than declared.
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
    """Yield the records of a table in the order of writing; `condition` is trusted SQL."""
    table = TABLES[table_name]
    names = ", ".join(f'"{name}"' for name in table.names)
    query = f'SELECT {names} FROM "{table_name}" {condition} ORDER BY id'
    for values in connection.execute(query):
        yield table.record(**decode(table, values))


T = TypeVar("T")

COMMIT_EVERY_S = 0.25
QUEUE_ROWS = 50_000


@dataclass(slots=True)
class WriterStats:
    """Statistics of the writer."""

    rows: int = 0
    """Rows committed."""
    commits: int = 0
    waits: int = 0
    """How often a producer had to wait for a full queue."""
    wait_s: float = 0.0
    """Time producers spent waiting for room."""


@dataclass(frozen=True, slots=True)
class Records:
    """Rows that are committed in one transaction."""

    rows: Sequence[tuple[Table, Row]]
    time: float


@dataclass(slots=True)
class Command:
    """A function to call with the connection after all earlier rows are committed."""

    action: Callable[[sqlite3.Connection], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


Item = Records | Columns | Command


class Writer:
    """The writer thread, which owns the connection from `start` to `stop`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        name: str,
        *,
        commit_every_s: float = COMMIT_EVERY_S,
        queue_rows: int = QUEUE_ROWS,
    ) -> None:
        """Take over a connection; `name` is the path for messages."""
        self.stats = WriterStats()
        self._connection = connection
        self._name = name
        self._deliver: Callable[[list[Row]], None]
        self._commit_every_s = commit_every_s
        self._capacity = queue_rows
        self._process = os.getpid()
        self._items: deque[Item] = deque()
        self._size = 0
        self._idle = False
        self._urgent = False
        self._stopping = False
        self.error: str | None = None
        """The error that stopped the thread, if any."""
        lock = threading.Lock()
        self._arrived = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="esper-store", daemon=True)

    # ------------------------------------------------------------------------------ for producers

    def start(self, deliver: Callable[[list[Row]], None]) -> None:
        """Start the thread; `deliver` gets every record after its commit."""
        self._deliver = deliver
        self._thread.start()

    def put(self, item: Records | Columns, size: int, *, wait: bool = True) -> None:
        """Queue rows; wait while the queue is full, unless the writer thread itself calls this."""
        with self._arrived:
            self._check()
            if wait and self._size + size > self._capacity and self._size:
                self._wait_for_room(size)
            self._append(item, size)

    def call(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Commit all earlier rows, call a function in the thread, and return its result."""
        command = Command(action)
        with self._arrived:
            self._check()
            self._urgent = True
            self._append(command, 0)
        while not command.done.wait(0.1):
            with self._arrived:
                self._check()
        if command.error is not None:
            raise command.error
        result: T = command.result
        return result

    def stop(self, timeout_s: float = 30.0) -> None:
        """Commit the remaining rows and end the thread; a second call does nothing."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        if self._thread.ident is not None and self._process == os.getpid():
            self._thread.join(timeout_s)

    def _check(self) -> None:
        if self.error is not None:
            raise StoreError(self.error)
        if self._process != os.getpid():
            raise StoreError(
                f"{self._name} is written by another process (this one was forked from it); "
                "record in the process that opened the store"
            )
        if self._stopping:
            raise StoreError(f"the store {self._name} is closed; open the run again to record")

    def _append(self, item: Item, size: int) -> None:
        self._items.append(item)
        self._size += size
        if self._size * 2 > self._capacity:
            self._urgent = True
        if self._idle or self._urgent:
            self._arrived.notify()

    def _wait_for_room(self, size: int) -> None:
        self.stats.waits += 1
        self._urgent = True
        self._arrived.notify()
        started = time.monotonic()
        try:
            while self._size and self._size + size > self._capacity:
                self._room.wait(0.1)
                self._check()
        finally:
            self.stats.wait_s += time.monotonic() - started

    # --------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        # Whatever ends the thread must be reported to the producer.
        try:
            while (items := self._take()) is not None:
                self._work(items)
        except StoreError as error:
            self._fail(str(error))
        except BaseException as error:
            self._fail(
                f"the writer of the store {self._name} stopped "
                f"({type(error).__name__}: {error}){checkpoint_kept()}"
            )
        finally:
            self._connection.close()

    def _take(self) -> list[Item] | None:
        """Wait for rows and those that follow soon, and return them; None at the end."""
        with self._arrived:
            while not self._items:
                if self._stopping:
                    return None
                self._idle = True
                self._arrived.wait()
                self._idle = False
            until = time.monotonic() + self._commit_every_s
            while not self._urgent and not self._stopping:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._arrived.wait(left)
            self._urgent = False
            items = list(self._items)
            self._items.clear()
            return items

    def _work(self, items: list[Item]) -> None:
        """Process items in order: rows in transactions, commands between them."""
        batch: list[Item] = []
        for item in items:
            if isinstance(item, Command):
                self._commit(batch)
                batch = []
                self._carry_out(item)
            else:
                batch.append(item)
        self._commit(batch)

    def _commit(self, batch: list[Item]) -> None:
        if not batch:
            return
        try:
            self._write(batch)
        except RowError:
            # One row is wrong: write the others.
            wrong: StoreError | None = None
            for item in batch:
                try:
                    self._write([item])
                except RowError as error:
                    wrong = wrong or error
            if wrong is not None:
                raise wrong from None
        with self._arrived:
            self._size -= sum(_size(item) for item in batch)
            self._room.notify_all()

    def _write(self, batch: list[Item]) -> None:
        rows, records = _collect(batch)
        if rows:
            write_rows(self._connection, rows, self._name)
            self.stats.rows += sum(len(found) for found in rows.values())
            self.stats.commits += 1
        if records:
            self._deliver(records)

    def _carry_out(self, command: Command) -> None:
        # The caller gets the error; the thread continues.
        try:
            command.result = command.action(self._connection)
        except StoreError as error:
            command.error = error
        except sqlite3.Error as error:
            command.error = cannot(f"write the store {self._name}", error, checkpoint_kept())
        finally:
            command.done.set()

    def _fail(self, message: str) -> None:
        with self._arrived:
            self.error = " ".join(message.split())
            waiting = [item for item in self._items if isinstance(item, Command)]
            self._items.clear()
            self._size = 0
            self._room.notify_all()
        for command in waiting:
            command.error = StoreError(self.error)
            command.done.set()


def _size(item: Item) -> int:
    if isinstance(item, Records):
        return len(item.rows)
    return item.size if isinstance(item, Columns) else 1


def _collect(batch: list[Item]) -> tuple[dict[str, list[tuple[Any, ...]]], list[Row]]:
    """Return the rows of every table, in order, and the records for sinks."""
    rows: dict[str, list[tuple[Any, ...]]] = {}
    records: list[Row] = []
    for item in batch:
        if isinstance(item, Records):
            for table, record in item.rows:
                rows.setdefault(table.name, []).append(encode(table, record, item.time))
                records.append(record)
        elif isinstance(item, Columns):
            rows.setdefault(item.table.name, []).extend(encode_columns(item))
    return rows, records
