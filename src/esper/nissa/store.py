"""RunStore: records what happens in a run.

    store = open_store("runs/first", RunRow(task="digits", controller="heuristic", epochs=60))
    store.write(EpochRow(step=1, val_score=71.2, val_loss=0.9))
    state["telemetry"] = store.watermark()      # before the checkpoint is renamed into place
    store.finish("finished", val_score=96.1)
    store.close()

Rows are passed to one writer thread and are in the file within a quarter of a second. An error
of the file is raised as `StoreError` at the next call. Monitors check the records, and their alarms
are written in the same transaction.
"""

from __future__ import annotations

import atexit
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from esper.leyline.errors import UsageError, option, reason_of
from esper.nissa.columns import TABLE_OF, TABLES, Row
from esper.nissa.database import (
    ANSWER_S,
    LOCK_FILE,
    OPENING_TIMEOUT_S,
    STORE_FILE,
    WRITING_TIMEOUT_S,
    StoreError,
    TimeLimit,
    cannot,
    connect_writer,
    create_database,
    remove_log,
    unanswered,
)
from esper.nissa.listing import change_run, commit_watermark, insert_run, read_run, roll_back
from esper.nissa.monitors import Watch
from esper.nissa.schema import AlarmRow, EpochRow, EventKind, EventRow
from esper.nissa.schema_runs import RunRow
from esper.nissa.sinks.sink import DEFAULT_SINKS, Sink, SinkContext, SinkPump, make_sink
from esper.nissa.writer import QUEUE_ROWS, Columns, Records, Writer, WriterStats
from esper.utils.files import WriterLock

STATUSES = ("finished", "interrupted", "failed")

OnAlarm = Callable[[AlarmRow], None]


class RunStore:
    """The open store of a run; `open_store` makes one."""

    def __init__(
        self,
        path: Path,
        run: RunRow,
        writer: Writer,
        lock: WriterLock,
        watch: Watch | None,
        on_alarm: OnAlarm | None,
    ) -> None:
        """Put the parts together; use `open_store`."""
        self.path = path
        self.run = run
        self._writer = writer
        self._lock = lock
        self._watch = watch
        self._on_alarm = on_alarm
        self._pumps: list[SinkPump] = []
        self._started = time.monotonic()
        self._at = (0, 0, 0)
        self._status: str | None = None
        self._is_closed = False
        self._inode = path.stat().st_ino

    @property
    def stats(self) -> WriterStats:
        """Rows and commits so far, and the time spent waiting."""
        return self._writer.stats

    # --------------------------------------------------------------------------------- what happens

    def write(self, *records: Row) -> None:
        """Record one or more rows in one transaction.

        Call it from one thread: monitors depend on the order of the records.
        """
        found = [(TABLE_OF[type(record)], record) for record in records]
        alarms: list[AlarmRow] = []
        if self._watch is not None:
            for record in records:
                alarms += self._watch.observe(record)
            found += [(TABLE_OF[AlarmRow], alarm) for alarm in alarms]
        for record in records:
            if isinstance(record, EpochRow):
                self._at = (record.round, record.row, record.step)
        self._writer.put(Records(found, time.time()), len(found))
        if self._on_alarm is not None:
            for alarm in alarms:
                self._on_alarm(alarm)

    def write_columns(self, table: str, columns: Mapping[str, Any]) -> None:
        """Record many rows of one table at once, as columns of equal length.

        A value that is not a list applies to every row; missing columns are NULL. These rows go to
        the file only, not to monitors and sinks.
        """
        if table not in TABLES or table == "runs":
            raise UsageError(f"there is no table {table!r}; known: {', '.join(list(TABLES)[1:])}")
        unknown = sorted(set(columns) - set(TABLES[table].names))
        if unknown:
            raise UsageError(f"the table {table!r} has no column {unknown[0]!r}")
        sizes = {len(value) for value in columns.values() if isinstance(value, list | tuple)}
        if len(sizes) != 1:
            raise UsageError(f"columns must be lists of one length, got lengths {sorted(sizes)}")
        size = sizes.pop()
        if size:
            self._writer.put(Columns(TABLES[table], dict(columns), size, time.time()), size)

    def event(self, kind: str, message: str | None = None, **columns: Any) -> None:
        """Record an event."""
        self.write(EventRow(kind=kind, message=message, **columns))

    # ------------------------------------------------------------------------------- checkpoints

    def watermark(self) -> dict[str, Any]:
        """Commit everything and return the position of the store, to be saved in a checkpoint.

        Raises:
            StoreError: The folder or the file was moved or removed.
        """
        self.check_in_place()

        def mark(connection: sqlite3.Connection) -> dict[str, Any]:
            cursors = {pump.name: pump.mark() for pump in self._pumps}
            known = {name: cursor for name, cursor in cursors.items() if cursor is not None}
            return commit_watermark(connection, str(self.run.run_id), known)

        return self._writer.call(mark)

    def check_in_place(self) -> None:
        """Raise if the folder or the file was moved or removed, which SQLite would not notice."""
        folder = self.path.parent
        if not self._lock.is_in_place:
            raise StoreError(
                f"{folder} was moved or removed while the run was writing to it; put it back and "
                f"continue from its last checkpoint with {option('resume')}"
            )
        try:
            is_same = self.path.stat().st_ino == self._inode
        except OSError:
            is_same = False
        if not is_same:
            raise StoreError(
                f"{self.path} was moved or removed while the run was writing to it; put it back, "
                "or leave it away to go on without what it held; then continue with "
                f"{option('resume')}"
            )

    def flush(self) -> None:
        """Wait until everything recorded so far is in the file."""
        self._writer.call(lambda connection: None)

    # --------------------------------------------------------------------------------------- ending

    def finish(self, status: str = "finished", **columns: Any) -> None:
        """Record how the run ended; `columns` are further columns of `runs`, its results."""
        if status not in STATUSES:
            raise UsageError(f"a run ends as {', '.join(STATUSES)}, got {status!r}")
        unknown = sorted(set(columns) - set(TABLES["runs"].names))
        if unknown:
            raise UsageError(f"the table 'runs' has no column {unknown[0]!r}")
        stats = self.stats
        volatile = {
            "ended": time.time(),
            "seconds": time.monotonic() - self._started,
            "waits": stats.waits,
            "wait_s": stats.wait_s,
            "dropped": sum(pump.dropped for pump in self._pumps),
        }
        changes = {"status": status, **volatile, **columns}

        def update(connection: sqlite3.Connection) -> None:
            change_run(connection, changes)

        self._writer.call(update)
        self._status = status

    def close(self) -> None:
        """Close sinks and writer; a run that was not finished counts as interrupted."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if os.getpid() != self.run.process:
            return
        try:
            if self._status is None and self._writer.error is None:
                self.finish("interrupted")
        except StoreError:
            # An error here must not hide the first one; the run counts as interrupted.
            self._status = "failed"
        finally:
            for pump in self._pumps:
                pump.close(self._status or "failed")
            self._writer.stop()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._status is None and self._writer.error is None:
            is_stopped = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
            note = " ".join(f"{type(error).__name__}: {error}".split())
            try:
                self.finish("interrupted" if is_stopped else "failed", note=note)
            except StoreError:
                self._status = "failed"
        self.close()

    # -------------------------------------------------------------------------------------- inside

    def start(
        self, sinks: Iterable[tuple[str, Sink]], context: Callable[[str], SinkContext]
    ) -> None:
        """Start the writer and the sinks; `open_store` calls it."""
        self._writer.start(self.deliver)
        atexit.register(self.close)
        for name, sink in sinks:
            self._pumps.append(SinkPump(name, sink, context(name), self._report_sink))

    def deliver(self, records: Sequence[Row]) -> None:
        """Pass committed records to the sinks; the writer thread calls it."""
        for pump in self._pumps:
            pump.offer(records)

    def _report_sink(self, name: str, why: str) -> None:
        round_number, row, step = self._at
        alarm = AlarmRow(
            round=round_number,
            row=row,
            step=step,
            volatile=True,
            monitor="sink_failed",
            severity="warning",
            subject=name,
            message=f"the sink {name} does not show everything: {why}",
            advice="The store keeps everything; mend the sink, and it shows the next run.",
        )
        try:
            self._writer.put(
                Records([(TABLE_OF[AlarmRow], alarm)], time.time()), size=1, wait=False
            )
        except StoreError:
            return
        if self._on_alarm is not None:
            self._on_alarm(alarm)


# ---------------------------------------------------------------------------------------- opening


def open_store(
    folder: str | os.PathLike[str],
    run: RunRow,
    *,
    resume: Mapping[str, Any] | bool = False,
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    watch: bool = True,
    on_alarm: OnAlarm | None = None,
    busy_timeout_s: float = WRITING_TIMEOUT_S,
    queue_rows: int = QUEUE_ROWS,
    lock: WriterLock | None = None,
) -> RunStore:
    """Open the store of a run folder for writing.

    Args:
        folder: The run folder; it is created if it does not exist.
        run: The run; `run_id`, the machine and the times are filled in.
        resume: False for a new run. To continue one: the watermark of its checkpoint, or True if
            it stopped before its first checkpoint. Later rows are deleted, in the store and in the
            sinks.
        sinks: Names of registered sinks, or sinks.
        watch: Whether monitors check the records.
        on_alarm: Called with every alarm, from any thread.
        busy_timeout_s: How long to wait while another program locks the file.
        queue_rows: Size of the queue; producers wait while it is full.
        lock: The lock of the folder, if the caller holds it already; `close` releases it.

    Raises:
        StoreError: The folder or the file cannot be used; one line says why.
        CheckpointError: Another process writes to the folder.
    """
    # Unknown names are refused before anything is opened.
    made_sinks = [make_sink(sink) for sink in sinks]
    path = Path(folder) / STORE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(f"create the run folder {folder}", error) from error
    if lock is None:
        lock = WriterLock(path.parent / LOCK_FILE)
        lock.acquire()
    connection = None
    try:
        is_new = not path.exists()
        if not is_new and resume is False:
            raise StoreError(
                f"{path.parent} already holds a run; continue it or choose another folder"
            )
        if is_new:
            # SQLite would replay the log of a removed store into the new one.
            remove_log(path)
            create_database(path, lambda made: insert_run(made, run))
        limit = TimeLimit(ANSWER_S)
        connection = connect_writer(
            path, limit, busy_timeout_s=min(busy_timeout_s, OPENING_TIMEOUT_S)
        )
        cursors: dict[str, Any] = {}
        with _explained(path, limit):
            if not is_new:
                mark = resume if isinstance(resume, Mapping) else None
                cursors = roll_back(connection, path, mark)
            changes: dict[str, Any] = {"process": os.getpid(), "host": platform.node()}
            if not is_new:
                # A run may be continued with changed settings.
                names = ("config", "rounds", "epochs", "controller", "device")
                changes |= {name: getattr(run, name) for name in names}
            change_run(connection, changes)
            run = read_run(connection)
            watching = Watch(run) if watch else None
            if watching is not None:
                watching.load(connection)
            connection.set_progress_handler(None, 0)
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * busy_timeout_s)}")
        writer = Writer(connection, str(path), queue_rows=queue_rows)
        store = RunStore(path, run, writer, lock, watching, on_alarm)
    except BaseException:
        if connection is not None:
            connection.close()
        lock.release()
        raise

    def context(name: str) -> SinkContext:
        return SinkContext(
            folder=path.parent, run=run, is_resumed=not is_new, cursor=cursors.get(name)
        )

    store.start(made_sinks, context)
    if resume is not False:
        _record_resume(store, resume, is_new)
    return store


def _record_resume(store: RunStore, resume: Mapping[str, Any] | bool, is_new: bool) -> None:
    if is_new and isinstance(resume, Mapping):
        store.event(
            EventKind.STORE_RESTARTED,
            "the store was missing; what happened before the checkpoint is not in it",
            severity="warning",
            volatile=True,
        )
    number = resume["number"] if isinstance(resume, Mapping) else 0
    store.event(
        EventKind.CHECKPOINT_LOADED,
        f"continued from checkpoint {number}" if number else "started over, without a checkpoint",
        volatile=True,
    )


@contextmanager
def _explained(path: Path, limit: TimeLimit) -> Iterator[None]:
    """Turn errors of opening an existing store into one line."""
    try:
        yield
    except sqlite3.Error as error:
        raise unanswered(f"write the store {path}", path, error, limit) from error
    except (LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise StoreError(
            f"the store {path} is damaged: {reason_of(error)}; put back the one that was there, or "
            "move it away to continue without it"
        ) from error
