"""The SQLite file of a run's store: creating, opening and checking it."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.leyline.errors import CheckpointError, option
from esper.nissa.columns import TABLES, VIEWS, Table, View
from esper.nissa.schema import SCHEMA_VERSION
from esper.utils.files import refuse_link

# ---- Time limits of queries, because a store may come from another person


ANSWER_S = 20.0
"""Time limit of Esper's own queries."""

_CHECK_EVERY = 10_000
"""SQLite instructions between two checks of the clock: well under a millisecond."""

_GRACE_S = 0.25


class TimeLimit:
    """Time limit of queries; SQLite calls it regularly and stops when it returns True.

    Ctrl-C works, too: Python raises it in this call, and SQLite then stops.

    Args:
        seconds: Time limit of one query; None is no limit.
        is_wanted: Returns False when nobody waits for the result any more.
    """

    def __init__(self, seconds: float | None, is_wanted: Callable[[], bool] | None = None) -> None:
        """Start with the full time."""
        self.seconds = seconds
        self.is_late = self.is_abandoned = False
        self.is_wanted = is_wanted
        self._left = seconds
        self._until: float | None = None
        self.start()

    def start(self) -> None:
        """Start the clock for another query."""
        self.is_late = False
        self._left = self.seconds
        self.go_on()

    def pause(self) -> None:
        """Stop the clock while the caller processes a row."""
        if self._until is not None:
            self._left = self._until - time.monotonic()
            self._until = None

    def go_on(self) -> None:
        """Continue the clock."""
        self._until = None if self._left is None else time.monotonic() + self._left

    def apply(self, connection: sqlite3.Connection) -> None:
        """Apply this limit to all further queries of a connection."""
        connection.set_progress_handler(self, _CHECK_EVERY)

    @contextmanager
    def watching(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Within the block, stop a query in time even if SQLite does not call the limit."""
        if self.seconds is None:
            yield
            return

        def end() -> None:
            self.is_late = True
            connection.interrupt()

        timer = threading.Timer(self.seconds + _GRACE_S, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def __call__(self) -> int:
        """Return 1 where the question has to end."""
        self.is_late = self._until is not None and time.monotonic() > self._until
        self.is_abandoned = self.is_wanted is not None and not self.is_wanted()
        return int(self.is_late or self.is_abandoned)


def checkpoint_kept() -> str:
    """Return the end of messages about rows that could not be written."""
    return f"; the last checkpoint is intact, then continue with {option('resume')}"


class StoreError(CheckpointError):
    """The store of a run cannot be opened, read or written; checkpoints are not affected."""


STORE_FILE = "run.db"
LOCK_FILE = "run.db.lock"
STORE_FILES = (STORE_FILE, f"{STORE_FILE}-wal", f"{STORE_FILE}-shm", LOCK_FILE)
"""All files of a store in its run folder."""

APPLICATION_ID = 0x45737072
"""Marks a SQLite file as an Esper store ("Espr")."""

BUSY_TIMEOUT_S = 5.0
"""How long a reader waits while another program locks the store."""
OPENING_TIMEOUT_S = 15.0
"""The same when a run opens its store."""
WRITING_TIMEOUT_S = 120.0
"""The same when a run writes; then it fails."""

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""Longest text that is read from a store."""


def store_path(run: str | os.PathLike[str]) -> Path:
    """Return the path of a run's store, given the run folder or the file."""
    path = Path(run)
    return path if path.name == STORE_FILE and not os.path.isdir(path) else path / STORE_FILE


def create_statements() -> list[str]:
    """Return the SQL that creates an empty store."""
    statements = []
    for table in TABLES.values():
        columns = ", ".join(column.declaration for column in table.columns)
        unique = "" if table.is_versioned or not table.key else f", UNIQUE ({_list(table.key)})"
        statements.append(
            f'CREATE TABLE "{table.stored_as}" (id INTEGER PRIMARY KEY, {columns}{unique})'
        )
        indexes = (*table.indexes, table.key) if table.is_versioned else table.indexes
        for index in indexes:
            name = f"{table.name}_by_{'_'.join(index)}"
            statements.append(f'CREATE INDEX "{name}" ON "{table.stored_as}" ({_list(index)})')
        if table.is_versioned:
            statements.append(_latest_view(table))
    statements += [_unfolding_view(view) for view in VIEWS.values()]
    statements.append(
        "CREATE TABLE watermarks "
        "(number INTEGER PRIMARY KEY, positions TEXT NOT NULL, sinks TEXT NOT NULL, time REAL)"
    )
    return statements


def _latest_view(table: Table) -> str:
    same = " AND ".join(f'later."{name}" = this."{name}"' for name in table.key)
    return (
        f'CREATE VIEW "{table.name}" AS SELECT * FROM "{table.stored_as}" AS this '
        f'WHERE NOT EXISTS (SELECT 1 FROM "{table.stored_as}" AS later '
        f"WHERE {same} AND later.id > this.id)"
    )


def _unfolding_view(view: View) -> str:
    """Return a view with `json_each`, the one JSON function that SQLite allows in every view."""
    key = ", ".join(f'this."{name}"' for name in TABLES[view.table].key)
    values = ", ".join(
        'one.value AS "value"'
        if name == "value"
        else f"(SELECT value FROM json_each(one.value) WHERE key = '{name}') AS \"{name}\""
        for name in view.values
    )
    return (
        f'CREATE VIEW "{view.name}" AS SELECT {key}, one.key AS "{view.name_column}", {values} '
        f'FROM "{TABLES[view.table].stored_as}" AS this, json_each(this."{view.column}") AS one'
    )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# --------------------------------------------------------------------------------------- writing


def create_database(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Create a store at `path`; `fill` writes its first rows in the same transaction."""
    fresh = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = _connect(fresh, "rwc")
        try:
            # Nobody reads the file yet, so one sync at the end is enough.
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA journal_mode = MEMORY")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in create_statements():
                connection.execute(statement)
            fill(connection)
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        _sync(fresh)
        os.replace(fresh, path)
    except (OSError, sqlite3.Error) as error:
        raise cannot(f"create the store {path}", error) from error
    finally:
        for leftover in (fresh, Path(f"{fresh}-wal"), Path(f"{fresh}-shm")):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def refuse_linked(path: Path) -> None:
    """Raise if a store, or a file that SQLite keeps beside it, is a link."""
    for name in (path, *(Path(f"{path}{end}") for end in ("-wal", "-shm", "-journal"))):
        refuse_link(name)
    if os.path.exists(f"{path}-journal"):
        # A store has a write-ahead log, no journal; rolling back a foreign one can delete files.
        raise StoreError(
            f"cannot write {path}: {path.name}-journal lies beside it, which no store of Esper "
            "has; remove that file"
        )
    if path.lstat().st_nlink > 1:
        raise StoreError(
            f"cannot write {path}: the file has another name elsewhere (a hard link), which would "
            "change with it; put a copy of the file in its place"
        )


def remove_log(path: Path) -> None:
    """Remove the logs of a missing store, and files of unfinished ones."""
    half_made = path.parent.glob(f".{path.name}.tmp-*")
    for leftover in (Path(f"{path}-wal"), Path(f"{path}-shm"), *half_made):
        try:
            leftover.unlink(missing_ok=True)
        except OSError as error:
            raise cannot(f"remove {leftover}, which a store left behind", error) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def connect_writer(
    path: Path, limit: TimeLimit | None = None, *, busy_timeout_s: float = OPENING_TIMEOUT_S
) -> sqlite3.Connection:
    """Open an existing store for writing; refuse links, and foreign, older or newer files."""
    limit = TimeLimit(ANSWER_S) if limit is None else limit
    connection = None
    try:
        refuse_linked(path)
        # Only the writer thread uses the connection from then on.
        connection = _connect(path, "rw", busy_timeout_s, share_between_threads=True)
        limit.apply(connection)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        check_identity(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        return connection
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, CheckpointError):
            raise
        raise unanswered(f"open the store {path}", path, error, limit) from error


# --------------------------------------------------------------------------------------- reading


def connect_reader(
    path: Path, limit: TimeLimit | None = None, *, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> sqlite3.Connection:
    """Open a store for reading; refuse a missing, foreign, older, newer or damaged one.

    Args:
        path: The file.
        limit: Time limit of each query.
        busy_timeout_s: How long to wait while another program locks the file.
    """
    limit = TimeLimit(ANSWER_S) if limit is None else limit
    # The methods of Path raise for invalid names.
    if not os.path.isfile(path):
        raise StoreError(f"there is no store at {path}; give the folder of a run")
    if path.stat().st_size == 0:
        raise StoreError(f"the store {path} is empty; the run stopped before it was made")
    connection = None
    try:
        connection = _connect(path, "ro", busy_timeout_s)
        try:
            limit.apply(connection)
            check_identity(connection, path)
        except sqlite3.OperationalError:
            # In a read-only folder SQLite cannot create the index of the log; a store without a
            # log needs none.
            wal = Path(f"{path}-wal")
            if wal.exists() and wal.stat().st_size > 0:
                raise
            connection.close()
            connection = _connect(path, "ro&immutable=1", busy_timeout_s)
            limit.apply(connection)
            check_identity(connection, path)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        return connection
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, StoreError):
            raise
        raise unanswered(f"read the store {path}", path, error, limit) from error


def check_identity(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a store, or has another schema.

    The whole schema is compared, because a foreign view or trigger would run whenever a table is
    read or written.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is not an Esper store; give the folder of a run")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer Esper (schema {version}, this one reads "
            f"{SCHEMA_VERSION}); update Esper"
        )
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by an older Esper (schema {version}, this one reads "
            f"{SCHEMA_VERSION}); read it with the Esper that wrote it"
        )
    changed = _changed_schema(_read_schema(connection))
    if changed is not None:
        raise StoreError(
            f"the store {path} is damaged or was changed: {changed}; use another copy of it"
        )


_Schema = list[tuple[str, str, str | None]]
"""Kind, name and SQL of everything in a store."""


def _changed_schema(found: _Schema) -> str | None:
    """Return how a schema differs from Esper's, None if it does not."""
    own = _own_schema()
    names = {part[:2] for part in found}
    for part in own:
        if part not in found:
            state = "another one" if part[:2] in names else "missing"
            return f"its {part[0]} {part[1]!r} is {state}"
    extra = list(found)
    for part in own:
        extra.remove(part)
    if not extra:
        return None
    return f"it has a {extra[0][0]} {extra[0][1][:80]!r}, which Esper does not make"


@functools.cache
def _own_schema() -> _Schema:
    made = sqlite3.connect(":memory:")
    try:
        for statement in create_statements():
            made.execute(statement)
        return _read_schema(made)
    finally:
        made.close()


def _read_schema(connection: sqlite3.Connection) -> _Schema:
    # Tables of ANALYZE are harmless.
    found = connection.execute(
        "SELECT type, name, sql FROM sqlite_master "
        "WHERE sql IS NULL OR sql NOT LIKE 'CREATE TABLE sqlite_stat_(%' LIMIT 1000"
    )
    return [(str(kind), str(name), sql) for kind, name, sql in found]


def _connect(
    path: Path,
    mode: str,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    *,
    share_between_threads: bool = False,
) -> sqlite3.Connection:
    # `as_uri` escapes the path, and SQLite unescapes it.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        check_same_thread=not share_between_threads,
    )


# ---------------------------------------------------------------------------------------- errors

_ADVICE = {
    sqlite3.SQLITE_FULL: "free some space",
    sqlite3.SQLITE_IOERR: "check the disk and its free space",
    sqlite3.SQLITE_BUSY: "another program holds it; close that program",
    sqlite3.SQLITE_LOCKED: "another program holds it; close that program",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable",
    sqlite3.SQLITE_PERM: "make the file and its folder writable",
    sqlite3.SQLITE_CANTOPEN: "check that the folder exists and may be written to",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; use another copy of it",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database; give the folder of a run",
}


def cannot(what: str, error: Exception, then: str = "") -> StoreError:
    """Return a `StoreError` for an error of SQLite or the system, in one line."""
    if isinstance(error, sqlite3.Error):
        reason = str(error)
        code = primary_code(error)
        advice = _ADVICE.get(code, "check the file")
    else:
        strerror = error.strerror if isinstance(error, OSError) else None
        reason = strerror or str(error) or type(error).__name__
        advice = "check the disk, or choose a folder that may be written to"
    return StoreError(" ".join(f"cannot {what}: {reason}; {advice}{then}".split()))


def unanswered(what: str, path: object, error: Exception, limit: TimeLimit) -> StoreError:
    """Return a `StoreError` for an error, or for a query that exceeded its time limit.

    Raises:
        BrokenPipeError: Nobody waits for the result any more.
        KeyboardInterrupt: The user interrupted it.
    """
    if limit.is_abandoned:
        raise BrokenPipeError("nobody waits for the answer") from None
    if limit.is_late:
        return StoreError(
            f"the store {path} did not answer within {limit.seconds:g} s; it may be damaged, or "
            "made to keep its readers waiting; use another copy of it"
        )
    if isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_INTERRUPT:
        raise KeyboardInterrupt from None
    return cannot(what, error)


def primary_code(error: sqlite3.Error) -> int:
    """Return the primary error code of SQLite, or 0."""
    code: int | None = vars(error).get("sqlite_errorcode")
    return 0 if code is None else code & 0xFF
