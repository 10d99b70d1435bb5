from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.schema import SCHEMA_VERSION, EpochRow
from tests.nissa.telling import run_row, tell
from tests.scripts.cli.terminal import environment, esper


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tables room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


HOSTILE = "<b>'); DROP TABLE runs; --\x1b[31m\x9b2J\u202e,\"\n\udcff"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("query") / "run"
    tell(folder, sinks=())
    return folder


def test_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "query", run, "SELECT step, val_score, twin_score FROM epochs LIMIT 3")
    assert (said.code, said.err) == (0, "")
    assert "val_score" in said.out
    assert "56.9314718" in said.out
    assert "–" in said.out


def test_a_wide_answer_is_shown_row_by_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "query", run, "SELECT * FROM decisions LIMIT 2")
    assert said.code == 0
    assert "row 1" in said.out
    assert "row 2" in said.out
    assert "confidence_blueprint" in said.out


def test_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "query", run, "SELECT step, twin_score FROM epochs", "--csv")
    assert (said.code, said.err) == (0, "")
    rows = list(csv.reader(io.StringIO(said.out)))
    assert rows[0] == ["step", "twin_score"]
    assert rows[1] == ["1", ""]
    assert len(rows) == 31


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(
        capsys, "query", run, "SELECT op, COUNT(*) AS n FROM decisions GROUP BY op", "--json"
    )
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == {
        "columns": ["op", "n"],
        "rows": [{"op": "ADVANCE", "n": 5}, {"op": "WAIT", "n": 24}],
        "truncated": False,
    }


@pytest.mark.parametrize("form", ["--json", "--csv", None])
def test_a_limit(run: Path, capsys: pytest.CaptureFixture[str], form: str | None) -> None:
    options = ["--limit", 2] + ([form] if form else [])
    said = esper(capsys, "query", run, "SELECT step FROM epochs", *options)
    assert said.code == 0
    if form == "--json":
        document = json.loads(said.out)
        assert (len(document["rows"]), document["truncated"]) == (2, True)
    else:
        assert "more than 2 rows" in said.err
    if form == "--csv":
        assert said.out == "step\n1\n2\n"


def test_a_long_table_is_cut_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write_columns("epochs", {"step": list(range(300))})
    said = esper(capsys, "query", tmp_path, "SELECT step FROM epochs")
    assert "more than 200 rows" in said.err
    said = esper(capsys, "query", tmp_path, "SELECT step FROM epochs", "--csv")
    assert len(said.out.splitlines()) == 301
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "DELETE FROM epochs"], "only reading is allowed"),
        (["{run}", "ATTACH 'x.db' AS x"], "only reading is allowed"),
        (["{run}", "SELECT nonsense"], "no such column: nonsense"),
        (
            [
                "{run}",
                "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
                "SELECT COUNT(*) FROM c",
                "--timeout",
                "0.2",
            ],
            "took longer than 0.2 s",
        ),
        (["{run}", "SELECT 1", "--limit", "-1"], "--limit must be 0 or more"),
        (["{run}", "SELECT 1", "--timeout", "-1"], "--timeout must be 0 or more"),
        (["{run}", "SELECT 1", "--json", "--csv"], "not allowed with argument"),
        (["{run}/nowhere", "SELECT 1"], "has no run.db"),
        (["{run}"], "SQL"),
    ],
)
def test_wrong_questions_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    said = esper(capsys, "query", *(one.format(run=run) for one in arguments))
    assert message in said.complaint()


def test_a_damaged_store_failed_while_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database at all" * 100)
    said = esper(capsys, "query", tmp_path, "SELECT 1")
    assert (said.code, said.out) == (1, "")
    assert len(said.err.splitlines()) == 1
    assert "is no SQLite database" in said.err


def test_a_store_of_an_older_esper_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(tmp_path, run_row(), sinks=()).close()
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    for verb in (("query", tmp_path, "SELECT 1"), ("report", tmp_path)):
        said = esper(capsys, *verb)
        assert (said.code, said.out) == (1, "")
        assert len(said.err.splitlines()) == 1
        assert (
            f"was written by an older Esper (schema 3, this one reads {SCHEMA_VERSION})" in said.err
        )


def test_hostile_text_is_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path, run_row(task=HOSTILE), sinks=()) as store:
        store.event(HOSTILE, HOSTILE * 1_000, data={HOSTILE: HOSTILE})
        store.write(EpochRow(step=1, val_loss=float("inf")))
    sql = "SELECT kind, message, data, x'00ff' AS blob, 1e999 AS big FROM events"
    said = esper(capsys, "query", tmp_path, sql)
    assert said.code == 0
    assert all(character.isprintable() or character == "\n" for character in said.out)
    assert len(said.out) < 10_000
    said = esper(capsys, "query", tmp_path, sql, "--json")
    (row,) = json.loads(said.out)["rows"]
    kept = HOSTILE.replace("\udcff", "\\udcff")
    assert said.out.isascii()
    assert (row["kind"], row["blob"], row["big"]) == (kept, "x'00ff'", None)
    said = esper(capsys, "query", tmp_path, "SELECT kind FROM events", "--csv")
    assert list(csv.reader(io.StringIO(said.out))) == [["kind"], [kept]]
    said = esper(capsys, "query", tmp_path, 'SELECT 1 AS "\x1b[31m"')
    assert "\x1b" not in said.out


def test_a_terminal_is_not_steered_by_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, run_row(task=HOSTILE), sinks=()):
        pass
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    said = esper(capsys, "query", tmp_path, "SELECT task FROM runs", "--csv")
    assert "\x1b" not in said.out
    assert "\\x1b" in said.out


def test_a_reader_that_goes_away_is_no_failure(run: Path) -> None:
    command = [sys.executable, "-m", "esper.scripts.cli.main", "query", str(run)]
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
    child = subprocess.Popen(
        [*command, numbers, "--csv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"x\n"
    child.stdout.close()
    assert child.stderr is not None
    complaint = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) == 0, complaint
    assert complaint == b""


@pytest.mark.skipif(os.name == "nt", reason="needs pipes that can be polled")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_question_whose_reader_has_gone_leaves_no_process_behind(
    run: Path, form: list[str]
) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT MAX(x) FROM c"
    command = [sys.executable, "-m", "esper.scripts.cli.main", "query", str(run), endless]
    child = subprocess.Popen([*command, "--timeout", "0", *form], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(timeout=60) == 0
