from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.nissa import StoreError, database, open_store, query_run
from esper.nissa.query import stream_query, unique_names
from esper.nissa.schema import EpochRow
from tests.nissa.conftest import Clock
from tests.nissa.telling import run_row, tell


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked") / "run"
    tell(folder, sinks=())
    return folder


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"


def test_answers_come_as_columns_and_rows(run: Path) -> None:
    result = query_run(run, "SELECT step, val_score AS score FROM epochs WHERE step < ?", (3,))
    assert result.columns == ("step", "score")
    assert [step for step, _ in result.rows] == [1, 2]
    assert not result.is_truncated
    assert result.to_dicts()[0] == {"step": 1, "score": 50.0}
    assert query_run(run / "run.db", "SELECT 1").rows == [(1,)]


def test_a_limit_says_when_there_was_more(run: Path) -> None:
    limited = query_run(run, "SELECT step FROM epochs", limit=3)
    assert (len(limited.rows), limited.is_truncated) == (3, True)
    assert not query_run(run, "SELECT step FROM epochs LIMIT 3", limit=3).is_truncated
    assert query_run(run, "SELECT step FROM epochs", limit=0).rows == []


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM epochs",
        "UPDATE runs SET task = 'x'",
        "INSERT INTO runs (kind, status) VALUES ('a', 'b')",
        "REPLACE INTO epochs (step) VALUES (1)",
        "DROP TABLE epochs",
        "CREATE TABLE mine (x)",
        "CREATE TEMP TABLE mine (x)",
        "CREATE VIEW mine AS SELECT 1",
        "CREATE INDEX mine ON epochs (step)",
        "CREATE TRIGGER t AFTER INSERT ON epochs BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "ALTER TABLE epochs ADD COLUMN x",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "VACUUM",
        "VACUUM INTO '{folder}/copy.db'",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "BEGIN EXCLUSIVE",
        "SAVEPOINT s",
        "COMMIT",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA writable_schema = ON",
        "PRAGMA user_version = 7",
        "PRAGMA query_only = OFF",
        "PRAGMA query_only",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA optimize",
        "SELECT load_extension('evil')",
        "SELECT fts3_tokenizer('x')",
        "WITH gone AS (SELECT 1) DELETE FROM epochs",
        "EXPLAIN DELETE FROM epochs",
    ],
)
def test_nothing_can_be_changed_attached_or_loaded(run: Path, sql: str) -> None:
    before = files(run)
    with pytest.raises(UsageError) as caught:
        query_run(run, sql.format(folder=run))
    assert "\n" not in str(caught.value)
    assert files(run) == before


def files(folder: Path) -> dict[str, bytes]:
    """Return what lies in a folder, but for what SQLite keeps there while somebody reads."""
    own = ("run.db-wal", "run.db-shm")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in own}


def test_an_attached_file_cannot_be_made(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only reading is allowed"):
        query_run(run, f"ATTACH '{tmp_path}/new.db' AS other")
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA table_info(epochs)",
        "PRAGMA index_list('decisions')",
        "PRAGMA user_version",
        "PRAGMA integrity_check",
        "PRAGMA journal_mode",
        "EXPLAIN QUERY PLAN SELECT * FROM decisions WHERE op = 'WAIT'",
        "SELECT name FROM sqlite_master",
        "SELECT json_extract(config, '$.growth.epochs') FROM runs",
        "SELECT MAX(val_score) OVER (ORDER BY step) FROM epochs",
        "VALUES (1), (2)",
    ],
)
def test_everything_that_reads_is_allowed(run: Path, sql: str) -> None:
    assert query_run(run, sql).rows


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nonsense FROM epochs", "no such column: nonsense"),
        ("SELECT * FROM epoch", "no such table: epoch; the page Telemetry"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "only one statement"),
        ("", "returns no columns; use SELECT"),
        ("-- only a comment", "returns no columns"),
        ("SELECT ?", "binding"),
        ("SELECT 1\x00; DROP TABLE epochs", "null character"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("SELECT '\udcff'", "surrogates"),
    ],
)
def test_a_wrong_question_is_one_line(run: Path, sql: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        query_run(run, sql)
    assert "\n" not in str(caught.value)


def test_an_endless_question_ends(run: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"took longer than 0\.3 s"):
        query_run(run, ENDLESS, timeout_s=0.3)
    assert time.monotonic() - started < 5


def test_endless_rows_end_as_well(run: Path) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
    with pytest.raises(UsageError, match="took longer"):
        query_run(run, endless, timeout_s=0.2)
    assert query_run(run, endless, limit=5).rows == [(x,) for x in range(1, 6)]


def test_ctrl_c_ends_a_question_at_once(run: Path) -> None:
    script = (
        "import sys; from esper.nissa import query_run\n"
        "said = []\n"
        "def is_wanted():\n"
        "    said or said.append(print('asking', flush=True))\n"
        "    return True\n"
        f"try:\n    query_run(sys.argv[1], {ENDLESS!r}, timeout_s=None, is_wanted=is_wanted)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "asking\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=20)[0] == "interrupted\n"
    assert child.returncode == 0


def test_rows_can_be_streamed(run: Path) -> None:
    with stream_query(run, "SELECT step FROM epochs") as (columns, rows):
        assert columns == ("step",)
        assert next(rows) == (1,)
        assert next(rows) == (2,)


def test_a_question_sees_a_run_that_is_going_on_and_does_not_hold_it_up(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(EpochRow(step=1))
        store.flush()
        with stream_query(tmp_path, "SELECT step FROM epochs") as (_, rows):
            assert next(rows) == (1,)
            store.write(EpochRow(step=2))
            store.flush()
        assert query_run(tmp_path, "SELECT COUNT(*) FROM epochs").rows == [(2,)]


def test_names_that_repeat_get_numbers(run: Path) -> None:
    assert unique_names(["id", "id", "x", "id"]) == ("id", "id:1", "x", "id:2")
    assert unique_names(["a", "a:1", "a"]) == ("a", "a:1", "a:2")
    result = query_run(run, "SELECT 1 AS a, 2 AS a")
    assert result.to_dicts() == [{"a": 1, "a:1": 2}]


def test_text_of_any_bytes_is_readable(tmp_path: Path) -> None:
    open_store(tmp_path, run_row(), sinks=()).close()
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("UPDATE runs SET task = CAST(x'41ff42' AS TEXT), note = x'00ff'")
    connection.commit()
    connection.close()
    assert query_run(tmp_path, "SELECT task, note FROM runs").rows == [("A\\xffB", b"\x00\xff")]


def test_damaged_missing_and_foreign_stores_are_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        query_run(tmp_path, "SELECT 1")
    data = bytearray((run / "run.db").read_bytes())
    # Every page but the first, which holds the schema.
    data[4096:] = os.urandom(len(data) - 4096)
    (tmp_path / "run.db").write_bytes(data)
    with pytest.raises(StoreError, match="damaged; use another copy"):
        query_run(tmp_path, "SELECT * FROM epochs")


@pytest.mark.slow
def test_ten_million_decisions_are_answered_in_under_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.telemetry import fill, questions
    from esper.scripts.cli.main import main

    rows = 10_000_000
    fill(tmp_path, rows)
    assert query_run(tmp_path, "SELECT COUNT(*) FROM decisions", timeout_s=None).rows == [(rows,)]
    for sql in questions(rows):
        plan = query_run(tmp_path, f"EXPLAIN QUERY PLAN {sql}").rows
        assert any("INDEX" in str(step[-1]) for step in plan), plan
        started = time.monotonic()
        assert query_run(tmp_path, sql).rows
        assert time.monotonic() - started < 1.0, sql
    for sql in questions(rows):
        started = time.monotonic()
        assert main(["query", str(tmp_path), sql, "--json"]) == 0
        assert time.monotonic() - started < 1.0, sql
        assert json.loads(capsys.readouterr().out)["rows"]
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    # More than a gigabyte; nobody wants to keep that.
    (tmp_path / "run.db").unlink()


def test_the_time_is_looked_at_between_rows_too(
    run: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come quickly are too short for SQLite to ask by itself."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    monkeypatch.setattr(database, "time", clock)
    with stream_query(run, endless, timeout_s=60) as (_, rows):
        next(rows)
        clock.ahead = 61
        with pytest.raises(UsageError, match="took longer than"):
            next(rows)
