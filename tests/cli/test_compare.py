from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.terminal import esper
from tests.nissa.telling import tell


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tables room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(tmp_path / "done", sinks=())
    tell(tmp_path / "stopped", stop_after=7, sinks=())
    said = esper(capsys, "compare", tmp_path / "done", tmp_path / "stopped")
    assert (said.code, said.err) == (0, "")
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4]
        for line in said.out.splitlines()
        if line.startswith("│")
    }
    assert [cell.strip() for cell in rows["state"]] == ["finished", "interrupted"]
    assert [cell.strip() for cell in rows["epochs"]] == ["30", "7"]
    assert "from epoch" in rows["what grew"][0]


def test_the_document_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "three"):
        tell(tmp_path / name, sinks=())
    folders = [tmp_path / name for name in ("one", "two", "three")]
    said = esper(capsys, "compare", *folders, "--json")
    runs = json.loads(said.out)["runs"]
    assert [Path(run["run"]).name for run in runs] == ["one", "two", "three"]
    assert runs[0]["seeds"][0]["fate"] == "fossilized"
    assert runs[0]["val_score"] == runs[1]["val_score"] is not None


def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "done", sinks=())
    assert "name two or more" in esper(capsys, "compare", tmp_path / "done").complaint()
    lost = esper(capsys, "compare", tmp_path / "done", tmp_path / "lost").complaint()
    assert "lost has no run.db" in lost
