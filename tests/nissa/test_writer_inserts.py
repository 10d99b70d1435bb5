from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.columns import TABLES
from esper.nissa.database import StoreError, connect_reader
from esper.nissa.schema import ContributionRow, EpochRow, EventRow
from esper.nissa.schema_runs import UpdateRow
from esper.nissa.writer import (
    Columns,
    decode,
    encode,
    encode_columns,
    insert_of,
    read_records,
    write_rows,
)
from tests.nissa.telling import run_row


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
    assert connection.execute("SELECT COUNT(*) FROM epochs").fetchone() == (0,)


def test_statements_name_every_column() -> None:
    for table in TABLES.values():
        insert = insert_of(table)
        values = insert.bind(tuple(table.names))
        assert insert.statement.count("?") == len(values)
        # Whatever follows the ordinal still meets its own column.
        assert values[-1] == table.names[-1]


def test_flags_json_and_absent_values_come_back() -> None:
    table = TABLES["updates"]
    values = {"round": 1, "is_last": 1, "q_by_op": '{"WAIT": 0.5}', "was_skipped": 0}
    row = decode(table, [values.get(name) for name in table.names])
    assert row["is_last"] is True
    assert row["was_skipped"] is False
    assert row["q_by_op"] == {"WAIT": 0.5}
    assert row["approx_kl"] is None


def test_records_come_back_as_they_were_told(tmp_path: Path) -> None:
    told = [
        EpochRow(step=step, val_score=0.5 * step, stabilized=step > 1, time=1.0) for step in (1, 2)
    ]
    update = UpdateRow(round=3, approx_kl=0.1, advantage_by_op={"WAIT": {"n": 3}}, time=2.0)
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(*told, update)
    connection = connect_reader(tmp_path / "run.db")
    assert list(read_records(connection, "epochs")) == told
    assert list(read_records(connection, "epochs", "WHERE step > 1")) == told[1:]
    assert list(read_records(connection, "updates")) == [update]
    connection.close()
