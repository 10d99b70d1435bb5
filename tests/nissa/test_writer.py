from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esper.nissa.columns import TABLE_OF, TABLES, Row
from esper.nissa.database import connect_writer, create_database
from esper.nissa.errors import StoreError
from esper.nissa.schema import ContributionRow, EpochRow, EventRow, UpdateRow
from esper.nissa.writer import (
    Columns,
    Records,
    Writer,
    encode,
    encode_columns,
    insert_of,
    write_rows,
)

Start = Callable[..., Writer]


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    create_database(tmp_path / "run.db", lambda made: None)
    opened = connect_writer(tmp_path / "run.db")
    yield opened
    opened.close()


@pytest.fixture
def start(connection: sqlite3.Connection) -> Iterator[Start]:
    started: list[Writer] = []

    def make(
        deliver: Callable[[list[Row]], None] = lambda records: None, **options: float
    ) -> Writer:
        writer = Writer(connection, "run.db", deliver, **options)  # type: ignore[arg-type]
        started.append(writer)
        writer.start()
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


def test_times_and_json_are_filled_in() -> None:
    table = TABLES["updates"]
    told = UpdateRow(q_by_op={"WAIT": 1.0}, approx_kl=0.5)
    row = dict(zip(table.names, encode(table, told, 7.0), strict=True))
    assert (row["time"], row["q_by_op"], row["approx_kl"]) == (7.0, '{"WAIT": 1.0}', 0.5)
    kept = dict(zip(table.names, encode(table, UpdateRow(time=3.0), 7.0), strict=True))
    assert (kept["time"], kept["q_by_op"]) == (3.0, None)
    heads = TABLES["update_heads"]
    assert encode(heads, heads.record(), 7.0) == heads.values(heads.record())


def test_columns_become_rows() -> None:
    table = TABLES["events"]
    values = {"step": [1, 2], "kind": "note", "data": [{"a": 1}, None]}
    rows = [
        dict(zip(table.names, row, strict=True))
        for row in encode_columns(Columns(table, values, 2, 9.0))
    ]
    assert [(row["step"], row["kind"], row["data"], row["time"]) for row in rows] == [
        (1, "note", '{"a": 1}', 9.0),
        (2, "note", None, 9.0),
    ]
    assert rows[0]["ordinal"] is None
    assert rows[0]["volatile"] is False


def test_ordinals_count_up_within_the_rest_of_the_key(connection: sqlite3.Connection) -> None:
    told = [
        ContributionRow(step=1, kind="a"),
        ContributionRow(step=1, kind="b"),
        ContributionRow(step=2, kind="c"),
        ContributionRow(step=1, ordinal=7, kind="d"),
        ContributionRow(step=1, kind="e"),
    ]
    table = TABLES["contributions"]
    write_rows(connection, {"contributions": [encode(table, row, 0.0) for row in told]}, "run.db")
    found = connection.execute("SELECT kind, step, ordinal FROM contributions ORDER BY id")
    assert found.fetchall() == [
        ("a", 1, 0),
        ("b", 1, 1),
        ("c", 2, 0),
        ("d", 1, 7),
        ("e", 1, 8),
    ]


def test_rows_about_the_machine_are_counted_apart(connection: sqlite3.Connection) -> None:
    table = TABLES["events"]
    told = [EventRow(kind="x"), EventRow(kind="y", volatile=True), EventRow(kind="z")]
    write_rows(connection, {"events": [encode(table, row, 0.0) for row in told]}, "run.db")
    found = connection.execute("SELECT kind, ordinal FROM events ORDER BY id").fetchall()
    assert found == [("x", 0), ("y", 0), ("z", 1)]


def test_a_failed_batch_leaves_no_transaction_open(connection: sqlite3.Connection) -> None:
    row = encode(TABLES["epochs"], EpochRow(step=1), 0.0)
    with pytest.raises(StoreError, match=r"epochs row \(round 0, row 0, step 1\)"):
        write_rows(connection, {"epochs": [row, row]}, "run.db")
    assert not connection.in_transaction
    assert count(connection) == 0


def test_statements_name_every_column() -> None:
    for table in TABLES.values():
        insert = insert_of(table)
        values = insert.bind(tuple(table.names))
        assert insert.statement.count("?") == len(values)
        # Whatever follows the ordinal still meets its own column.
        assert values[-1] == table.names[-1]
