from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.schema import EpochRow
from tests.nissa.telling import run_row, tell
from tests.scripts.cli.terminal import esper


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tables room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


HOSTILE = "<b>'); DROP TABLE runs; --\x1b[31m\x9b2J\u202e\udcff" + "long" * 500


def test_runs_are_listed_with_their_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "done", sinks=())
    tell(tmp_path / "stopped", stop_after=7, sinks=())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"no database")
    said = esper(capsys, "runs", "--root", tmp_path)
    assert (said.code, said.err) == (0, "")
    for word in ("finished", "interrupted", "damaged", "digits", "heuristic", "90.00"):
        assert word in said.out
    assert "7/30 epochs" in said.out


def test_a_gain_says_on_which_split_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    with open_store(tmp_path / "one", run_row(), sinks=()) as store:
        store.finish("finished", val_score=90.0, twin_val_score=89.72)
    said = esper(capsys, "runs", "--root", ".")
    assert "test" not in said.out
    with open_store(tmp_path / "two", run_row(), sinks=()) as store:
        store.finish(
            "finished",
            val_score=90.0,
            twin_val_score=89.72,
            test_score=88.0,
            twin_test_score=88.83,
        )
    said = esper(capsys, "runs", "--root", ".")
    names, second, *_ = [line for line in said.out.splitlines() if "┃" in line]
    columns = [
        " ".join((one.strip(), two.strip()))
        for one, two in zip(names.split("┃"), second.split("┃"), strict=True)
    ]
    (row,) = [line for line in said.out.splitlines() if "two" in line]
    cells = dict(zip(columns, map(str.strip, row.split("│")), strict=True))
    assert (cells["val gain"], cells["test gain"]) == ("+0.28", "-0.83")
    said = esper(capsys, "runs", "--root", ".", "--json")
    (told,) = [run for run in json.loads(said.out)["runs"] if run["path"].endswith("two")]
    assert round(told["val_gain"], 2) == 0.28
    assert round(told["test_gain"], 2) == -0.83


def test_the_document_has_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(tmp_path / "done", sinks=())
    with open_store(tmp_path / "going", run_row(epochs=60), sinks=()) as store:
        store.write(EpochRow(step=12, val_score=70.5))
        store.flush()
        said = esper(capsys, "runs", "--root", tmp_path, "--json")
    assert (said.code, said.err) == (0, "")
    document = json.loads(said.out)
    assert document["root"] == str(tmp_path)
    runs = {Path(run["path"]).name: run for run in document["runs"]}
    assert set(runs) == {"done", "going"}
    going = runs["going"]
    assert (going["state"], going["done"], going["planned"], going["unit"]) == (
        "running",
        12,
        60,
        "epochs",
    )
    assert going["val_score"] == 70.5
    assert going["age_s"] < 60
    assert runs["done"]["state"] == "finished"


def test_the_usual_folder_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = esper(capsys, "runs")
    assert (said.code, said.out) == (0, "")
    assert "there are no runs in runs" in said.err
    said = esper(capsys, "runs", "--json")
    assert json.loads(said.out) == {"root": "runs", "runs": []}
    tell(tmp_path / "runs" / "first", stop_after=2, sinks=())
    assert "runs/first" in esper(capsys, "runs").out


def test_a_named_folder_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "runs", "--root", tmp_path / "nowhere")
    assert "there is no folder" in said.complaint()


def test_hostile_names_are_only_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J<i>"))
    store = open_store(folder, run_row(task=HOSTILE, controller=HOSTILE, name=HOSTILE), sinks=())
    store.finish("failed", note=HOSTILE)
    store.close()
    said = esper(capsys, "runs", "--root", tmp_path)
    assert said.code == 0
    assert all(character.isprintable() or character == "\n" for character in said.out)
    assert len(said.out) < 10_000
    monkeypatch.setenv("COLUMNS", "60")
    narrow = esper(capsys, "runs", "--root", tmp_path)
    assert "interrupted" in narrow.out
    said = esper(capsys, "runs", "--root", tmp_path, "--json")
    (run,) = json.loads(said.out)["runs"]
    assert said.out.isascii()
    assert run["task"].startswith("<b>'); DROP TABLE runs; --\x1b[31m")
    assert "\\udcff" in run["path"]
    json.dumps(run).encode()
