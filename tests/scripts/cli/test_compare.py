from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.records import StackRecord
from esper.nissa.reader import open_run
from esper.scripts.cli.compare import Side, print_sides
from esper.simic.agent.config import PPOConfig
from esper.simic.training.recorded import start_training
from tests.nissa.telling import tell
from tests.scripts.cli.terminal import esper
from tests.simic.training.tiny import tiny_config


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
    assert {"validation gain over the twin", "test gain over the twin"} <= rows.keys()


def test_the_document_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "three"):
        tell(tmp_path / name, sinks=())
    folders = [tmp_path / name for name in ("one", "two", "three")]
    said = esper(capsys, "compare", *folders, "--json")
    runs = json.loads(said.out)["runs"]
    assert [Path(run["run"]).name for run in runs] == ["one", "two", "three"]
    assert runs[0]["seeds"][0]["fate"] == "fossilized"
    assert runs[0]["val_score"] == runs[1]["val_score"] is not None


def test_the_compute_of_a_deepened_run_is_a_share_of_the_static_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unknown = dict.fromkeys(field.name for field in dataclasses.fields(Side))
    stacks = (StackRecord(name="h", awake=2, blocks=4),)
    known = {"run": "deep", "state": "finished", "epochs": 3, "seeds": (), "stacks": stacks}
    side = Side(**{**unknown, **known, "training_flops": 3e9, "static_flops": 4e9})
    print_sides([side])
    assert "3e+09, 75 % of the static network's" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "done", sinks=())
    assert "give two or more runs" in esper(capsys, "compare", tmp_path / "done").complaint()
    lost = esper(capsys, "compare", tmp_path / "done", tmp_path / "lost").complaint()
    assert "lost has no run.db" in lost


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two training runs of a round, with one setting changed."""
    root = tmp_path_factory.mktemp("trained")
    for name, changes in (("one", {}), ("two", {"seed": 4, "ppo": PPOConfig(epochs=1)})):
        config = tiny_config(rounds=1, **changes)
        with start_training(root / name, config, sinks=()) as run:
            assert run.carry_out()
            run.finish()
    return [root / "one", root / "two"]


def test_training_runs_stand_side_by_side_with_what_differs(
    trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper(capsys, "compare", *trained)
    assert (said.code, said.err) == (0, "")
    rows = [
        [cell.strip() for cell in line.split("│")[1:4]]
        for line in said.out.splitlines()
        if line.startswith("│")
    ]
    assert [row for row in rows if row[0] == "seed"] == [["seed", "3", "4"]]
    assert ["ppo.epochs", "2", "1"] in rows
    assert ["decisions", "36", "36"] in rows
    assert not [row for row in rows if row[0] == "ppo.clip"]
    runs = json.loads(esper(capsys, "compare", *trained, "--json").out)["runs"]
    told = next(row for row in rows if row[0] == "return")
    assert told[1:] == [f"{run['last']['return_mean']:+.3f}" for run in runs]


def test_training_runs_are_compared_by_the_entropy_of_every_head(
    trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = esper(capsys, "compare", *trained).out
    runs = json.loads(esper(capsys, "compare", *trained, "--json").out)["runs"]
    for head in HEAD_NAMES:
        cells = next(line for line in text.splitlines() if f" entropy, {head} " in line).split("│")
        values = [run["last"]["entropy"][head] for run in runs]
        told = ["–" if value is None else f"{value:.2f}" for value in values]
        assert [cell.strip() for cell in cells[2:4]] == told
    with open_run(trained[0]) as stored:
        rows = stored.rows("update_heads", where="head = 'op'")
    assert (
        runs[0]["last"]["entropy"]["op"]
        == max(rows, key=lambda row: row["ordinal"])["entropy_conditional"]
    )


def test_runs_of_two_kinds_do_not_compare(
    trained: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "grown", sinks=())
    words = esper(capsys, "compare", tmp_path / "grown", trained[0]).complaint()
    assert "only runs of the same kind" in words
    assert "one is of `esper train`" in words
