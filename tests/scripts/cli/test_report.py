from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.nissa import open_store
from tests.nissa.report.runs import growing_run
from tests.nissa.report.test_init_stored import ROW, tell
from tests.scripts.cli.terminal import esper


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_store(tmp_path / "run", ROW, sinks=()) as store:
        tell(store, growing_run(), 4)
    return tmp_path / "run"


def test_the_path_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "report", run)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"report: {run / 'report.html'}\n"
    assert "Written after epoch 4 of 60" in (run / "report.html").read_text()


def test_the_document_is_all_there_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "report", run, "--out", run / "other.html", "--json")
    document = json.loads(said.out)
    assert document["report"] == str(run / "other.html")
    assert document["bytes"] == (run / "other.html").stat().st_size
    assert not (run / "report.html").exists()


def test_a_wrong_request_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no run.db" in esper(capsys, "report", tmp_path / "gone").complaint()
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "config.yaml").write_text("command: prove\n")
    words = esper(capsys, "report", tmp_path / "proof").complaint()
    assert "`esper prove`, which has no run.db; its results are in report.md" in words
    # `esper demo` leaves a report without a database.
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "report.html").touch()
    words = esper(capsys, "report", tmp_path / "demo").complaint()
    assert words.endswith(f"but a finished report: open {tmp_path / 'demo' / 'report.html'}")
    assert "is a folder" in esper(capsys, "report", run, "--out", run).complaint()
    (run / "run.db").write_bytes(b"not a database" * 100)
    said = esper(capsys, "report", run)
    assert said.code == 1
    assert said.err.count("\n") == 1
