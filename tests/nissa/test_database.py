from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError, EsperError, UsageError
from esper.nissa.columns import TABLES
from esper.nissa.database import (
    APPLICATION_ID,
    StoreError,
    cannot,
    connect_reader,
    connect_writer,
    create_database,
    create_statements,
    primary_code,
    store_path,
)
from esper.nissa.query import query_run
from esper.nissa.schema import SCHEMA_VERSION


def nothing(connection: sqlite3.Connection) -> None:
    """Leave a new store empty."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_database(tmp_path / "run.db", nothing)
    return tmp_path / "run.db"


def test_a_store_is_found_by_its_folder_or_by_itself(tmp_path: Path) -> None:
    assert store_path(tmp_path) == tmp_path / "run.db"
    assert store_path(str(tmp_path / "run.db")) == tmp_path / "run.db"
    (tmp_path / "odd" / "run.db").mkdir(parents=True)
    assert store_path(tmp_path / "odd" / "run.db") == tmp_path / "odd" / "run.db" / "run.db"


def test_a_new_store_says_what_it_is(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert {*TABLES, "watermarks"} <= names
    assert sorted(file.name for file in path.parent.iterdir()) == ["run.db"]


def test_keys_are_unique_and_questions_about_them_use_an_index(path: Path) -> None:
    connection = sqlite3.connect(path)
    for table in TABLES.values():
        if not table.key:
            continue
        condition = " AND ".join(f'"{name}" = 1' for name in table.key)
        plan = connection.execute(
            f'EXPLAIN QUERY PLAN SELECT * FROM "{table.name}" WHERE {condition}'
        ).fetchall()
        assert any("INDEX" in step[-1] for step in plan), plan
        assert not any(step[-1].startswith("SCAN") for step in plan), plan
    connection.execute("INSERT INTO epochs (round, row, step) VALUES (0, 0, 1)")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute("INSERT INTO epochs (round, row, step) VALUES (0, 0, 1)")
    connection.close()


def test_a_seed_is_seen_as_it_was_told_last(path: Path) -> None:
    connection = sqlite3.connect(path)
    for fate in ("germinated", "training", "pruned"):
        connection.execute(
            "INSERT INTO seeds_versions (round, row, ordinal, fate) VALUES (0, 0, 0, ?)", (fate,)
        )
    connection.execute("INSERT INTO seeds_versions (round, row, ordinal) VALUES (0, 0, 1)")
    assert connection.execute("SELECT ordinal, fate FROM seeds").fetchall() == [
        (0, "pruned"),
        (1, None),
    ]
    connection.close()


def test_creating_fails_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the store") as caught:
        create_database(tmp_path / "file" / "run.db", nothing)
    assert "\n" not in str(caught.value)

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("SELECT nonsense")

    with pytest.raises(StoreError, match="no such column"):
        create_database(tmp_path / "run.db", fail)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_is_missing_empty_or_foreign_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        connect_reader(tmp_path / "nowhere" / "run.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreError, match="is empty"):
        connect_reader(tmp_path / "empty.db")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE runs (x)")
    foreign.commit()
    foreign.close()
    for connect in (connect_reader, connect_writer):
        with pytest.raises(StoreError, match="is not an Esper store"):
            connect(tmp_path / "foreign.db")
    (tmp_path / "text.db").write_text("something else entirely" * 100)
    for connect in (connect_reader, connect_writer):
        with pytest.raises(StoreError, match="is no SQLite database"):
            connect(tmp_path / "text.db")
    with pytest.raises(StoreError, match="cannot open the store"):
        connect_writer(tmp_path / "nowhere.db")


@pytest.mark.parametrize(
    ("version", "advice"),
    [(99, "newer Esper"), (SCHEMA_VERSION - 1, "older Esper"), (0, "older Esper")],
)
def test_another_version_is_refused(path: Path, version: int, advice: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    for connect in (connect_reader, connect_writer):
        with pytest.raises(StoreError, match=advice) as caught:
            connect(path)
        assert f"schema {version}" in str(caught.value)


def test_a_damaged_store_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:200] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        query_run(path, "SELECT * FROM runs")


def test_a_reader_cannot_write(path: Path) -> None:
    connection = connect_reader(path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("INSERT INTO runs (kind, status) VALUES ('grow', 'running')")
    connection.close()


def test_any_bytes_may_be_in_a_path(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 #?%41&mode=rwc\x01"))
    create_database(folder / "run.db", nothing)
    connect_writer(folder / "run.db").close()
    connect_reader(folder / "run.db").close()
    assert (folder / "run.db").is_file()
    assert len(list(tmp_path.iterdir())) == 1


def test_messages_are_one_line_with_advice() -> None:
    error = sqlite3.OperationalError("database or\ndisk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert str(cannot("write x", error)) == (
        "cannot write x: database or disk is full; free some space"
    )
    assert primary_code(sqlite3.OperationalError("bare")) == 0
    assert "Permission denied" in str(cannot("x", PermissionError(13, "Permission denied")))
    assert str(cannot("x", RuntimeError())).startswith("cannot x: RuntimeError;")


def test_every_statement_is_one() -> None:
    assert all(sqlite3.complete_statement(f"{text};") for text in create_statements())


def test_a_store_error_is_a_failure_while_running_and_no_wrong_request() -> None:
    assert issubclass(StoreError, CheckpointError)
    assert issubclass(StoreError, EsperError)
    assert issubclass(StoreError, OSError)
    assert not issubclass(StoreError, UsageError)
