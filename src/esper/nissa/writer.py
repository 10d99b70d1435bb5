"""The writer thread: takes rows off a bounded queue and commits them to SQLite in batches.

Nothing a producer hands over is dropped: when the queue is full the producer waits, and the wait
is measured. A batch is committed a quarter of a second after its first row at the latest (longer
only while SQLite itself is busy), so that a killed process loses less than a second. What goes
wrong in the thread is raised to the producer at its next call, as one line.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from esper.nissa.columns import Row, Table
from esper.nissa.database import CHECKPOINT_KEPT, StoreError, cannot
from esper.nissa.inserts import Columns, RowError, encode, encode_columns, write_rows

T = TypeVar("T")

COMMIT_EVERY_S = 0.25
QUEUE_ROWS = 50_000


@dataclass(slots=True)
class WriterStats:
    """What the writer has done, and what it cost its producers."""

    rows: int = 0
    """Rows committed."""
    commits: int = 0
    waits: int = 0
    """How often a producer found the queue full."""
    wait_s: float = 0.0
    """Time producers spent waiting for room."""


@dataclass(frozen=True, slots=True)
class Records:
    """Rows that belong together: they are committed in one transaction."""

    rows: Sequence[tuple[Table, Row]]
    time: float


@dataclass(slots=True)
class Command:
    """Something to do with the connection after everything before it is committed."""

    action: Callable[[sqlite3.Connection], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


Item = Records | Columns | Command


class Writer:
    """Owns the connection from `start` to `stop`; all other methods are for producers."""

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
        """What stopped the thread, if anything did."""
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
        """Hand rows over; wait while the queue is full, unless the writer itself may be asking."""
        with self._arrived:
            self._check()
            if wait and self._size + size > self._capacity and self._size:
                self._wait_for_room(size)
            self._append(item, size)

    def call(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Have the thread commit what came before, do something, and return its result."""
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
        """Commit what is left and end the thread; does nothing the second time."""
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
        # The border of the thread: whatever ends it must reach the producer.
        try:
            while (items := self._take()) is not None:
                self._work(items)
        except StoreError as error:
            self._fail(str(error))
        except BaseException as error:
            self._fail(
                f"the writer of the store {self._name} stopped "
                f"({type(error).__name__}: {error}){CHECKPOINT_KEPT}"
            )
        finally:
            self._connection.close()

    def _take(self) -> list[Item] | None:
        """Wait for rows, give others time to join them, and return them; None is the end."""
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
        """Carry out items in order: rows in transactions, commands between them."""
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
            # One row is wrong: the others must not suffer for it.
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
        # What fails belongs to whoever asked; the thread goes on unless SQLite is beyond use.
        try:
            command.result = command.action(self._connection)
        except StoreError as error:
            command.error = error
        except sqlite3.Error as error:
            command.error = cannot(f"write the store {self._name}", error, CHECKPOINT_KEPT)
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
