"""Read-only SQL on the store of a run.

The file is opened for reading, and an authorizer allows SELECT only: a query cannot write, attach
or load anything. A query stops at its time limit, when nobody waits for its result, and at Ctrl-C.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from esper.leyline.errors import UsageError, reason_of
from esper.nissa.database import (
    MAX_VALUE_BYTES,
    StoreError,
    TimeLimit,
    cannot,
    connect_reader,
    primary_code,
    store_path,
)

TIMEOUT_S = 60.0

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "writefile", "readfile"})
_PRAGMAS_WITH_ARGUMENT = frozenset(
    {
        "foreign_key_list",
        "index_info",
        "index_list",
        "index_xinfo",
        "integrity_check",
        "quick_check",
        "table_info",
        "table_list",
        "table_xinfo",
    }
)
_PRAGMAS = _PRAGMAS_WITH_ARGUMENT | {
    "application_id",
    "compile_options",
    "database_list",
    "function_list",
    "journal_mode",
    "page_count",
    "page_size",
    "schema_version",
    "user_version",
}


Answer = tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]
"""Columns of a result, and an iterator over its rows."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    """Column names; repeated ones are numbered."""
    rows: list[tuple[Any, ...]]
    is_truncated: bool
    """Whether there are more rows than the limit."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return every row as {column: value}."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def query_run(
    run: str | os.PathLike[str],
    sql: str,
    parameters: Sequence[Any] = (),
    *,
    limit: int | None = None,
    timeout_s: float | None = TIMEOUT_S,
    is_wanted: Callable[[], bool] | None = None,
) -> QueryResult:
    """Return the result of one SELECT on the store of a run.

    Args:
        run: A run folder, or its `run.db`.
        sql: One SELECT statement.
        parameters: Values for `?` in it.
        limit: Most rows to return; all by default.
        timeout_s: Time limit in seconds; none if None.
        is_wanted: Returns False when nobody waits for the result any more.

    Raises:
        UsageError: The statement is wrong, writes, or takes too long.
        BrokenPipeError: Nobody waits for the result any more.
        StoreError: The store is missing, damaged, foreign or newer.
    """
    answer = stream_query(run, sql, parameters, timeout_s=timeout_s, is_wanted=is_wanted)
    with answer as (columns, rows):
        return collect(columns, rows, limit)


@contextmanager
def stream_query(
    run: str | os.PathLike[str],
    sql: str,
    parameters: Sequence[Any] = (),
    *,
    timeout_s: float | None = TIMEOUT_S,
    is_wanted: Callable[[], bool] | None = None,
) -> Iterator[Answer]:
    """Yield columns and rows, which are read one by one; otherwise like `query_run`."""
    path = store_path(run)
    connection = connect_reader(path, TimeLimit(timeout_s, is_wanted))
    try:
        restrict(connection)
        with ask_connection(
            connection, str(path), sql, parameters, timeout_s=timeout_s, is_wanted=is_wanted
        ) as answer:
            yield answer
    finally:
        connection.close()


@contextmanager
def ask_connection(
    connection: sqlite3.Connection,
    name: str,
    sql: str,
    parameters: Sequence[Any] = (),
    *,
    timeout_s: float | None = TIMEOUT_S,
    is_wanted: Callable[[], bool] | None = None,
) -> Iterator[Answer]:
    """Run one query on a restricted connection; `name` is the path for messages.

    Its time limit and its transaction end with the block, so that the writer can truncate its log.
    """
    limit = TimeLimit(timeout_s, is_wanted)
    limit.apply(connection)
    try:
        with _explained(name, limit), limit.watching(connection):
            cursor = connection.execute(sql, parameters)
        with closing(cursor):
            if cursor.description is None:
                raise UsageError("the statement returns no columns; use SELECT")
            columns = unique_names([entry[0] for entry in cursor.description])
            yield columns, _rows(cursor, name, limit)
    finally:
        connection.set_progress_handler(None, 0)


def collect(
    columns: tuple[str, ...], rows: Iterator[tuple[Any, ...]], limit: int | None = None
) -> QueryResult:
    """Return all rows of a result, or the first ones."""
    found = list(islice(rows, limit))
    return QueryResult(columns, found, limit is not None and next(rows, None) is not None)


def restrict(connection: sqlite3.Connection) -> None:
    """Allow a connection to read only."""
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.set_authorizer(_authorize)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return unique names, as in `id`, `id:1`, `id:2`."""
    seen: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        candidate = name
        while candidate in seen:
            candidate = f"{name}:{seen[name]}"
            seen[name] += 1
        seen[candidate] = 1
        unique.append(candidate)
    return tuple(unique)


def _text(data: bytes) -> str:
    # A foreign file may hold bytes that are not UTF-8.
    return data.decode("utf-8", "backslashreplace")


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, source: str | None
) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        is_forbidden = (second or "").lower() in _FORBIDDEN_FUNCTIONS
        return sqlite3.SQLITE_DENY if is_forbidden else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        allowed = _PRAGMAS if second is None else _PRAGMAS_WITH_ARGUMENT
        return sqlite3.SQLITE_OK if (first or "").lower() in allowed else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor, path: str, limit: TimeLimit) -> Iterator[tuple[Any, ...]]:
    with _explained(path, limit):
        while (row := cursor.fetchone()) is not None:
            # SQLite checks the limit within a row only; many rows may be fast ones.
            if limit():
                raise sqlite3.OperationalError("interrupted")
            yield row


_OF_THE_FILE = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
    }
)


@contextmanager
def _explained(path: str, limit: TimeLimit) -> Iterator[None]:
    """Turn errors of SQLite into one line: of the statement, or of the file."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        if limit.is_abandoned:
            raise BrokenPipeError("nobody waits for the answer") from None
        if limit.is_late:
            raise UsageError(
                f"the query took longer than {limit.seconds:g} s; select fewer rows, or allow "
                "more time with --timeout"
            ) from None
        code = primary_code(error) if isinstance(error, sqlite3.Error) else 0
        if code == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from None
        if isinstance(error, sqlite3.Error) and code in _OF_THE_FILE:
            raise cannot(f"read the store {path}", error) from None
        raise UsageError(_question_error(error)) from None
    except (StoreError, MemoryError) as error:
        raise StoreError(f"cannot answer from {path}: {error or 'out of memory'}") from None


def _question_error(error: Exception) -> str:
    reason = reason_of(error)
    if isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_AUTH:
        return f"only reading is allowed ({reason}); use SELECT"
    if "one statement at a time" in reason:
        return "only one statement is allowed; leave out what follows the first ';'"
    where = (
        "; the page Telemetry of the documentation lists all tables and columns"
        * reason.startswith("no such")
    )
    return f"the query failed: {reason}{where}"
