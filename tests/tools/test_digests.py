from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import torch

from tools import digests
from tools.digests import (
    RUNS,
    TABLES,
    Run,
    differences,
    digest_data,
    digest_tensors,
    file_figures,
    main,
    play_here,
    store_figures,
)


def test_numbers_count_to_the_last_bit_and_times_do_not_count() -> None:
    data = {"score": 0.1, "seconds": 3, "parts": [{"twin_seconds": 1, "gain": 2}]}
    assert digest_data(data) == digest_data(
        {"parts": [{"gain": 2}], "score": 0.1, "run": "/elsewhere", "message": "other words"}
    )
    assert digest_data(data) != digest_data({**data, "score": 0.1 + 2**-56})


def test_weights_are_the_same_under_other_names_and_not_by_other_numbers() -> None:
    one, other = torch.arange(4.0), torch.ones(2, 2)
    assert digest_tensors([one, other]) == digest_tensors([other, one.clone()])
    assert digest_tensors([one, other]) != digest_tensors([one, other.flatten()])
    # A part of a larger tensor is its own numbers alone.
    assert digest_tensors([torch.arange(8.0)[:4]]) == digest_tensors([one])


def test_every_column_with_a_value_is_a_figure(tmp_path: Path) -> None:
    def store(name: str, score: float, time: float) -> Path:
        path = tmp_path / name
        connection = sqlite3.connect(path)
        for table in TABLES:
            connection.execute(f"CREATE TABLE {table} (id, step, score, data, time, ended, empty)")
        rows = [(2, 1, score, '{"a": 1, "seconds": 2}', time, 7), (1, 0, 0.5, "[1]", time, 7)]
        for table in ("runs", "epochs"):
            connection.executemany(
                f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, NULL)",
                rows if name == "one" else rows[::-1],
            )
        connection.commit()
        connection.close()
        return path

    one = store_figures(store("one", 1.0, 3.0))
    assert set(one) == {
        *("epochs.step", "epochs.score", "epochs.data", "epochs.ended"),
        *("runs.step", "runs.score", "runs.data"),
    }
    assert store_figures(store("again", 1.0, 4.0)) == one
    changed = store_figures(store("changed", 2.0, 3.0))
    assert {key for key in one if one[key] != changed[key]} == {"epochs.score", "runs.score"}


def test_parts_of_json_files_are_figures(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"best": [1, 2], "run": "/here", "seconds": 1}')
    (tmp_path / "b.json").write_text("[3]")
    (tmp_path / "c.jsonl").write_text('{"arm": "x"}\n{"arm": "w"}\n')
    found = file_figures(tmp_path, "a.json", "b.json", "c.jsonl")
    assert set(found) == {"a.json: best", "b.json: all", "c.jsonl"}
    (tmp_path / "c.jsonl").write_text('{"arm": "w"}\n{"arm": "x"}\n')
    assert file_figures(tmp_path, "c.jsonl")["c.jsonl"] == found["c.jsonl"]


def test_what_differs_is_named() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "3"}) == [
        "b: 2 was recorded, 4 is found",
        "c: gone (3)",
        "d: new (3)",
    ]


def test_recording_comparing_and_skipping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"score": "1"}
    monkeypatch.setattr(digests, "figures_of", lambda name, instruction_set: dict(found))
    monkeypatch.setitem(RUNS, "ray", Run(RUNS["ray"].play, needs="a_package_nobody_has"))
    file = str(tmp_path / "digests.json")
    assert main(["grow", "ray", "--file", file]) == 1
    assert "grow: nothing is recorded under default" in capsys.readouterr().out
    assert main(["grow", "ray", "--write", "--file", file]) == 0
    assert "ray: skipped, a_package_nobody_has is not installed" in capsys.readouterr().out
    assert main(["grow", "ray", "--file", file]) == 0
    assert "grow: the same, 1 figures" in capsys.readouterr().out
    found["score"] = "2"
    assert main(["grow", "--file", file]) == 1
    assert "  score: 1 was recorded, 2 is found" in capsys.readouterr().out
    recorded = json.loads(Path(file).read_text())
    recorded["default"]["torch"] = "1.0"
    Path(file).write_text(json.dumps(recorded))
    with pytest.raises(SystemExit):
        main(["grow", "--file", file])
    assert "recorded with PyTorch 1.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["grew"])
    assert "there is no run 'grew'" in capsys.readouterr().err


def test_a_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNS, "tasks", Run(lambda folder: {"tasks": digest_data(folder.name)}))
    play_here("tasks", tmp_path)
    assert json.loads((tmp_path / "figures.json").read_text()) == {"tasks": digest_data("work")}


def test_all_runs_are_recorded_where_digests_are_committed() -> None:
    recorded = json.loads(digests.RECORDED.read_text(encoding="utf-8"))
    assert set(recorded["default"]["runs"]) == set(RUNS)
