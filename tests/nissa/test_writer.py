from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esper.nissa.columns import TABLE_OF, TABLES, Row
from esper.nissa.database import StoreError
from esper.nissa.schema import EpochRow
from esper.nissa.writer import Columns, Records, Writer

Start = Callable[..., Writer]


@pytest.fixture
def start(connection: sqlite3.Connection) -> Iterator[Start]:
    started: list[Writer] = []

    def make(
        deliver: Callable[[list[Row]], None] = lambda records: None, **options: float
    ) -> Writer:
        writer = Writer(connection, "run.db", **options)  # type: ignore[arg-type]
        started.append(writer)
        writer.start(deliver)
        return writer

    yield make
    for writer in started:
        writer.stop()


def records(*rows: Row) -> Records:
    return Records([(TABLE_OF[type(row)], row) for row in rows], 5.0)


def count(connection: sqlite3.Connection) -> int:
    found: int = connection.execute("SELECT COUNT(*) FROM epochs").fetchone()[0]
    return found


def test_commands_come_after_what_was_put_before_and_before_what_follows(start: Start) -> None:
    writer = start()
    for step in range(5):
        writer.put(records(EpochRow(step=step)), 1)
    assert writer.call(count) == 5
    writer.put(records(EpochRow(step=5)), 1)
    assert writer.call(count) == 6
    assert writer.stats.rows == 6


def test_rows_are_gathered_into_few_commits(start: Start) -> None:
    writer = start(commit_every_s=0.2)
    for step in range(2_000):
        writer.put(records(EpochRow(step=step)), 1)
    writer.call(count)
    assert writer.stats.commits <= 5
    assert writer.stats.waits == 0


def test_records_are_delivered_in_order_after_their_commit(
    start: Start, connection: sqlite3.Connection
) -> None:
    seen: list[tuple[int, int]] = []

    def deliver(delivered: list[Row]) -> None:
        in_file = count(connection)
        seen.extend((record.step, in_file) for record in delivered if isinstance(record, EpochRow))

    writer = start(deliver)
    for step in range(20):
        writer.put(records(EpochRow(step=step)), 1)
    writer.call(count)
    assert [step for step, _ in seen] == list(range(20))
    assert all(in_file > step for step, in_file in seen)


def test_what_fails_in_a_command_belongs_to_whoever_asked(start: Start) -> None:
    writer = start()

    def wrong(connection: sqlite3.Connection) -> None:
        connection.execute("SELECT nonsense")

    with pytest.raises(StoreError, match="no such column: nonsense"):
        writer.call(wrong)
    writer.put(records(EpochRow(step=1)), 1)
    assert writer.call(count) == 1


def test_producers_in_several_threads_lose_nothing(start: Start) -> None:
    writer = start(queue_rows=50)

    def produce(row: int) -> None:
        for step in range(200):
            writer.put(records(EpochRow(row=row, step=step)), 1)

    threads = [threading.Thread(target=produce, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.call(count) == 800
    assert writer.stats.waits > 0


def test_more_rows_than_the_queue_holds_still_pass(start: Start) -> None:
    writer = start(queue_rows=10)
    writer.put(Columns(TABLES["epochs"], {"step": list(range(100))}, 100, 0.0), 100)
    assert writer.call(count) == 100


def test_stopping_commits_what_is_left(start: Start, tmp_path: Path) -> None:
    writer = start(commit_every_s=60.0)
    writer.put(records(EpochRow(step=1)), 1)
    started = time.monotonic()
    writer.stop()
    assert time.monotonic() - started < 5
    again = sqlite3.connect(tmp_path / "run.db")
    assert count(again) == 1
    again.close()
    with pytest.raises(StoreError, match="is closed"):
        writer.put(records(EpochRow(step=2)), 1)


def test_a_failing_thread_wakes_everybody_up(start: Start) -> None:
    def deliver(delivered: list[Row]) -> None:
        raise MemoryError("no more")

    writer = start(deliver, commit_every_s=0.0)
    writer.put(records(EpochRow(step=1)), 1)
    deadline = time.monotonic() + 5
    while writer.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(StoreError, match=r"stopped \(MemoryError: no more\)"):
        writer.put(records(EpochRow(step=2)), 1)
    with pytest.raises(StoreError, match="stopped"):
        writer.call(count)
