"""RunStore: what a run calls to write down what happens.

    store = open_store("runs/first", RunRow(task="digits", controller="heuristic", epochs=60))
    store.epoch(step=1, val_score=71.2, val_loss=0.9)
    state["telemetry"] = store.watermark()      # before the checkpoint is renamed into place
    store.finish("finished", val_score=96.1)
    store.close()

Rows are handed to one writer thread and are in the file within a quarter of a second. Whatever
goes wrong with the file is a `StoreError` at the next call. Monitors look at the records as they
pass, and their alarms are rows of the same transaction.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from esper.leyline.errors import UsageError
from esper.nissa.columns import TABLE_OF, TABLES, Row
from esper.nissa.database import StoreError
from esper.nissa.inserts import Columns
from esper.nissa.lock import WriterLock
from esper.nissa.metrics import make_histogram
from esper.nissa.monitors.watch import Watch
from esper.nissa.schema import (
    AlarmRow,
    ContributionRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    EventRow,
    RoundRow,
    RunRow,
    SeedRow,
    StageRow,
    UpdateHeadRow,
    UpdateRow,
)
from esper.nissa.sinks.contract import Sink, SinkContext
from esper.nissa.sinks.pump import SinkPump
from esper.nissa.watermarks import change_run, commit_watermark
from esper.nissa.writer import Records, Writer, WriterStats

STATUSES = ("finished", "interrupted", "failed")

OnAlarm = Callable[[AlarmRow], None]


class RunStore:
    """The open store of a run; `open_store`, in `opening`, makes one."""

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

    @property
    def stats(self) -> WriterStats:
        """What was written, and what it cost."""
        return self._writer.stats

    # --------------------------------------------------------------------------------- what happens

    def write(self, *records: Row) -> None:
        """Record one or more rows; those given together are committed together.

        Call it from one thread: monitors look at records in the order in which they come.
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

        A value that is no list stands for every row; columns left out are absent. These rows go to
        the file alone: monitors and sinks work on what is recorded row by row.
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

    def epoch(self, **columns: Any) -> None:
        """Record what was measured after an epoch."""
        self.write(EpochRow(**columns))

    def decision(self, **columns: Any) -> None:
        """Record a decision of the controller."""
        self.write(DecisionRow(**columns))

    def seed(self, **columns: Any) -> None:
        """Record a seed as it stands now; it replaces what was recorded of it before."""
        self.write(SeedRow(**columns))

    def stage(self, **columns: Any) -> None:
        """Record an occupied slot at the end of an epoch."""
        self.write(StageRow(**columns))

    def contribution(self, **columns: Any) -> None:
        """Record what a seed was measured to be worth."""
        self.write(ContributionRow(**columns))

    def round(self, **columns: Any) -> None:
        """Record a round of training."""
        self.write(RoundRow(**columns))

    def update(self, **columns: Any) -> None:
        """Record one epoch of a policy update, after its heads."""
        self.write(UpdateRow(**columns))

    def head(self, **columns: Any) -> None:
        """Record one head in one epoch of a policy update."""
        self.write(UpdateHeadRow(**columns))

    def episode(self, **columns: Any) -> None:
        """Record how an episode ended."""
        self.write(EpisodeRow(**columns))

    def alarm(self, **columns: Any) -> None:
        """Record an alarm of one's own."""
        alarm = AlarmRow(**columns)
        self.write(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    def event(self, kind: str, message: str | None = None, **columns: Any) -> None:
        """Record that something happened."""
        self.write(EventRow(kind=kind, message=message, **columns))

    def live(self, kind: str, message: str | None = None, **columns: Any) -> None:
        """Tell the sinks something that is not kept; dropped, and counted, in a hurry."""
        columns.setdefault("severity", "debug")
        self._writer.put_live(EventRow(kind=kind, message=message, **columns))

    def histogram(self, name: str, values: Any, *, step: int) -> None:
        """Show the distribution of some numbers in the sinks; it is in no table."""
        histogram = make_histogram(name, values, step)
        if histogram is not None:
            self._writer.put_live(histogram)

    # ------------------------------------------------------------------------------- checkpoints

    def watermark(self) -> dict[str, Any]:
        """Commit everything and return where the store stands, to be saved in a checkpoint."""

        def mark(connection: sqlite3.Connection) -> dict[str, Any]:
            cursors = {pump.name: pump.mark() for pump in self._pumps}
            known = {name: cursor for name, cursor in cursors.items() if cursor is not None}
            return commit_watermark(connection, str(self.run.run_id), known)

        return self._writer.call(mark)

    def flush(self) -> None:
        """Return when everything recorded so far is in the file."""
        self._writer.call(lambda connection: None)

    # --------------------------------------------------------------------------------------- ending

    def finish(self, status: str = "finished", **columns: Any) -> None:
        """Say how the run ended; further columns of `runs` are its results."""
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
            "dropped": stats.dropped + sum(pump.dropped for pump in self._pumps),
        }
        changes = {"status": status, **volatile, **columns}

        def update(connection: sqlite3.Connection) -> None:
            change_run(connection, changes)

        self._writer.call(update)
        self._status = status

    def close(self) -> None:
        """End the sinks and the writer; a run that was not finished counts as interrupted."""
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
            # Closing must not hide why it closes; the next open finds the run interrupted.
            self._status = "failed"
        finally:
            for pump in self._pumps:
                pump.close(self._status or "failed")
            self._writer.stop()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._writer.start()
        atexit.register(self.close)
        for name, sink in sinks:
            self._pumps.append(SinkPump(name, sink, context(name), self._report_sink))

    def deliver(self, records: Sequence[Row]) -> None:
        """Hand committed records to the sinks; the writer thread calls it."""
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
