"""Opening the store of a run folder for writing: a new run, or one that is continued."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from esper.nissa.database import (
    BUSY_TIMEOUT_S,
    LOCK_FILE,
    STORE_FILE,
    StoreError,
    cannot,
    connect_writer,
    create_database,
)
from esper.nissa.events import EventKind
from esper.nissa.lock import WriterLock
from esper.nissa.monitors.watch import Watch
from esper.nissa.schema import RunRow
from esper.nissa.sinks.contract import Sink, SinkContext, make_sink
from esper.nissa.store import OnAlarm, RunStore
from esper.nissa.watermarks import change_run, insert_run, read_run, roll_back
from esper.nissa.writer import COMMIT_EVERY_S, QUEUE_ROWS, Writer

DEFAULT_SINKS = ("tensorboard",)


def open_store(
    folder: str | os.PathLike[str],
    run: RunRow,
    *,
    resume: Mapping[str, Any] | bool = False,
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    watch: bool = True,
    on_alarm: OnAlarm | None = None,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    commit_every_s: float = COMMIT_EVERY_S,
    queue_rows: int = QUEUE_ROWS,
) -> RunStore:
    """Open the store of a run folder for writing.

    Args:
        folder: The run folder; it is created where it is missing.
        run: What is being run; `run_id`, the machine and the times are filled in.
        resume: False for a new run. To continue one: the watermark that its checkpoint holds, or
            True when it stopped before its first checkpoint. What lies beyond is deleted, in the
            store and in the sinks.
        sinks: Names of registered sinks, or sinks.
        watch: Whether monitors look at the records.
        on_alarm: Called with every alarm, from any thread.
        busy_timeout_s: How long to wait for another program that holds the file.
        commit_every_s: How long a row may wait for others before they are committed.
        queue_rows: Rows that may wait; beyond, producers wait.

    Raises:
        StoreError: The folder or the file cannot be used; one line says why.
    """
    # A name that is wrong is found before anything is opened.
    made_sinks = [make_sink(sink) for sink in sinks]
    path = Path(folder) / STORE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(f"create the run folder {folder}", error) from error
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
            create_database(path, lambda made: insert_run(made, run))
        connection = connect_writer(path, busy_timeout_s=busy_timeout_s)
        cursors: dict[str, Any] = {}
        if not is_new:
            mark = resume if isinstance(resume, Mapping) else None
            cursors = _translate(path, lambda made: roll_back(made, path, mark), connection)
        changes: dict[str, Any] = {"process": os.getpid(), "host": platform.node()}
        if not is_new:
            # A run may be continued with other settings than it began with.
            changes |= {"config": run.config, "rounds": run.rounds}
        _translate(path, lambda made: change_run(made, changes), connection)
        run = read_run(connection)
        watching = Watch(run) if watch else None
        if watching is not None:
            watching.load(connection)
        store = _assemble(
            path, run, connection, lock, watching, on_alarm, commit_every_s, queue_rows
        )
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
        _tell_resumed(store, resume, is_new)
    return store


def _assemble(
    path: Path,
    run: RunRow,
    connection: sqlite3.Connection,
    lock: WriterLock,
    watch: Watch | None,
    on_alarm: OnAlarm | None,
    commit_every_s: float,
    queue_rows: int,
) -> RunStore:
    # The writer hands records on to the store, which is made after it.
    made: list[RunStore] = []
    writer = Writer(
        connection,
        str(path),
        lambda records: made[0].deliver(records),
        commit_every_s=commit_every_s,
        queue_rows=queue_rows,
    )
    made.append(RunStore(path, run, writer, lock, watch, on_alarm))
    return made[0]


def _tell_resumed(store: RunStore, resume: Mapping[str, Any] | bool, is_new: bool) -> None:
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


def _translate(
    path: Path, action: Callable[[sqlite3.Connection], Any], connection: sqlite3.Connection
) -> Any:
    try:
        return action(connection)
    except sqlite3.Error as error:
        raise cannot(f"write the store {path}", error) from error
