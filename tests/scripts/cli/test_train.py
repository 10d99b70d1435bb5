from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from esper.nissa import open_run, recorded
from esper.scripts.cli import views as train_view
from esper.simic.training import recorded as training
from esper.simic.training.config import RECIPES, TrainConfig
from esper.utils import files
from tests.scripts.cli.terminal import Said, esper

TINY = (
    *("train", "smoke", "--task", "digits_mlp", "--rounds", 2, "--envs", 2),
    *("--episode-length", 4, "--device", "cpu"),
    *("--set", "policy.lstm_hidden_dim=16", "--set", "strategy=sequential"),
)

Command = Callable[..., Said]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    return lambda *arguments: esper(capsys, *arguments)


def stop_at(
    monkeypatch: pytest.MonkeyPatch, round_number: int, step: int, *numbers: signal.Signals
) -> None:
    """Have signals arrive while a step of a round is shown."""
    shown = train_view.TrainView.show

    def show(self: Any, progress: Any) -> None:
        shown(self, progress)
        place = (progress.phase, progress.round, progress.step)
        if place == ("rollout", round_number, step):
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(train_view.TrainView, "show", show)


def learned(document: dict[str, Any]) -> dict[str, Any]:
    left_out = ("seconds", "run", "report", "policy")
    return {key: value for key, value in document.items() if key not in left_out}


# ---------------------------------------------------------------------------------- what it leaves


def test_a_run_leaves_its_folder_and_tells_what_was_learned(
    command: Command, tmp_path: Path
) -> None:
    said = command(*TINY, "--out", "run")
    assert said.code == 0, said.err
    for text in (
        "Trained on digits_mlp: 2 rounds, 16 decisions",
        "validation gain over the twin",
        "explained variance",
        "policy: run/checkpoints/best",
        "report: run/report.html",
    ):
        assert text in said.out
    assert "round 1/2  return " in said.err
    assert "round 2/2  return " in said.err
    run = tmp_path / "run"
    assert {"checkpoints", "config.yaml", "log.txt", "report.html", "run.db", "tb"} <= {
        entry.name for entry in run.iterdir()
    }
    assert {entry.name for entry in (run / "checkpoints").iterdir()} == {
        "best",
        "latest",
        "previous",
    }
    config = TrainConfig.from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    assert (config.recipe, config.tasks, config.rows, config.device) == (
        "smoke",
        ("digits_mlp",),
        2,
        "cpu",
    )
    assert "A controller trained on digits_mlp" in (run / "report.html").read_text()
    with open_run(run) as stored:
        assert (stored.info.kind, stored.info.status) == ("train", "finished")
        assert stored.info.command is not None
        assert stored.info.command.startswith("esper train smoke --task digits_mlp")


def test_the_other_commands_know_a_training_run(command: Command, tmp_path: Path) -> None:
    said = command(*TINY, "--json", "--out", "runs/tiny")
    document = json.loads(said.out)
    assert document["rounds"] == 2
    assert set(document["last"]) >= {"return_mean", "gain_mean", "approx_kl", "wait_share_free"}
    listed = json.loads(command("runs", "--json").out)["runs"][0]
    assert (listed["kind"], listed["done"], listed["planned"], listed["unit"]) == (
        "train",
        2,
        2,
        "rounds",
    )
    assert listed["val_score"] is not None
    assert listed["val_gain"] is not None
    rows = command("query", "runs/tiny", "SELECT round, return_mean FROM rounds", "--json")
    assert len(json.loads(rows.out)["rows"]) == 2
    assert command("report", "runs/tiny", "--out", "page.html").code == 0
    assert (tmp_path / "page.html").is_file()
    grown = command(
        *("grow", "--task", "digits_mlp", "--epochs", 5, "--no-twin"),
        *("--controller", "runs/tiny", "--out", "runs/grown"),
    )
    assert grown.code == 0, grown.err


def test_settings_of_a_run_are_a_recipe(command: Command, tmp_path: Path) -> None:
    assert command(*TINY, "--json", "--out", "one").code == 0
    said = command("train", "one/config.yaml", "--json", "--out", "two")
    assert said.code == 0, said.err
    again = command("train", "one", "--rounds", 1, "--json", "--out", "three")
    assert json.loads(again.out)["rounds"] == 1
    one, two = ((tmp_path / name / "summary.json").read_text() for name in ("one", "two"))
    assert learned(json.loads(one)) == learned(json.loads(two))


# ----------------------------------------------------------------------------------- wrong requests


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "digit", "--out", "run"), ("did you mean 'digits'",)),
        (("train", "smoke", "--task", "digts", "--out", "run"), ("did you mean 'digits'",)),
        (("train", "smoke", "--rounds", "0", "--out", "run"), ("rounds must be at least 1",)),
        (("train", "smoke", "--set", "ppo.clp=1", "--out", "run"), ("did you mean 'clip'",)),
        (("train", "smoke", "--set", "ppo", "--out", "run"), ("KEY=VALUE",)),
        (("train", "smoke", "--set", "ppo.clip=much", "--out", "run"), ("a number", "'much'")),
        (("train", "--resume", "--out", "nowhere"), ("nowhere", "not there")),
        (("train", "smoke", "--reset-heads", "op", "--out", "run"), ("add --resume",)),
        (("train", "smoke", "--from", "previous", "--out", "run"), ("add --resume",)),
        (("train", "--resume", "--overwrite", "--out", "run"), ("give one of them",)),
        (("train", "--resume", "--rounds", "9", "--out", "run"), ("--set rounds=",)),
        (("train", "--resume"), ("--resume needs --out RUN",)),
        (("train", "smoke", "--device", "cuda", "--out", "run"), ("no CUDA device",)),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = command(*arguments).complaint()
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()


def test_a_recipe_file_that_is_none_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("rounds: many\n")
    assert "is no recipe" in command("train", "bad.yaml", "--out", "run").complaint()
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe: [")
    assert "is no recipe" in command("train", "bad.yaml", "--out", "run").complaint()


def test_what_is_there_is_kept_unless_told_otherwise(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    assert "is not empty and no run folder" in command(*TINY, "--out", "run").complaint()
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_wrong_request_does_not_destroy_the_run_it_would_replace(
    command: Command, tmp_path: Path
) -> None:
    assert command(*TINY, "--rounds", 1, "--out", "run").code == 0
    again = ("--overwrite", "--out", "run")
    line = command("train", "smoke", "--task", "fashion", "--data", "no/where", *again).complaint()
    assert "does not exist" in line
    assert "digits_mlp" in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_the_help_has_a_line_for_every_recipe(command: Command) -> None:
    said = command("train", "--help")
    assert said.code == 0
    for name in RECIPES:
        assert f"\n  {name} " in said.out
    assert "esper train --resume" in said.out


# ------------------------------------------------------------------------------- stopping, going on


def test_a_run_that_is_stopped_in_mid_episode_goes_on_exactly(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = command(*TINY, "--json", "--out", "whole")
    assert whole.code == 0, whole.err
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 2, signal.SIGINT)
        said = command(*TINY, "--json", "--out", "run")
    assert said.code == 130
    assert said.out == ""
    assert said.err.splitlines()[-1] == (
        "interrupted in round 2; continue with: esper train --resume --out run"
    )
    with open_run(tmp_path / "run") as stored:
        assert (stored.info.status, len(stored.rows("rounds"))) == ("interrupted", 1)
    resumed = command("train", "--resume", "--json", "--out", "run")
    assert resumed.code == 0, resumed.err
    assert learned(json.loads(resumed.out)) == learned(json.loads(whole.out))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_a_run_opens_is_heeded_after_the_first_step(
    number: signal.Signals, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = command(*TINY, "--json", "--out", "whole")
    opened = training.start_training

    def open_slowly(*arguments: Any, **named: Any) -> Any:
        signal.raise_signal(number)
        return opened(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(training, "start_training", open_slowly)
        said = command(*TINY, "--json", "--out", "run")
    assert said.code == 130
    assert said.err.splitlines()[-1] == (
        "interrupted in round 1; continue with: esper train --resume --out run"
    )
    resumed = command("train", "--resume", "--json", "--out", "run")
    assert learned(json.loads(resumed.out)) == learned(json.loads(whole.out))


def test_a_second_signal_stops_at_once(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "SAME_REQUEST_S", -1.0)
        stop_at(patch, 1, 2, signal.SIGINT, signal.SIGINT)
        said = command(*TINY, "--out", "run")
    assert said.code == 130
    assert said.err.splitlines()[-1] == "esper: interrupted"
    assert command("train", "--resume", "--out", "run").code == 0


def test_a_finished_run_may_be_asked_again_and_prolonged(command: Command, tmp_path: Path) -> None:
    first = command(*TINY, "--json", "--out", "run")
    again = command("train", "--resume", "--json", "--out", "run")
    assert again.code == 0, again.err
    assert learned(json.loads(again.out)) == learned(json.loads(first.out))
    more = command("train", "--resume", "--set", "rounds=3", "--json", "--out", "run")
    assert json.loads(more.out)["rounds"] == 3
    with open_run(tmp_path / "run") as stored:
        assert stored.info.rounds == 3


def test_changes_of_a_continued_run_are_recorded(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 2, signal.SIGTERM)
        assert command(*TINY, "--out", "run").code == 130
    changes = ("--set", "ppo.clip=0.1", "--reset-heads", "blueprint,tempo")
    said = command("train", "--resume", *changes, "--out", "run")
    assert said.code == 0, said.err
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["ppo"]["clip"] == 0.1
    with open_run(tmp_path / "run") as stored:
        events = stored.rows("events", where="kind = 'settings_changed'")
        assert len(events) == 1
        assert "ppo.clip 0.5 -> 0.1" in events[0]["message"]
        assert events[0]["data"]["reset_heads"] == ["blueprint", "tempo"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "fresh heads: blueprint, tempo" in page
    wrong = command("train", "--resume", "--reset-heads", "blueprnt", "--out", "run")
    assert "there is no head 'blueprnt'" in wrong.complaint()
    fixed = command("train", "--resume", "--set", "rows=9", "--out", "run")
    assert "rows" in fixed.complaint()


def test_a_full_disk_ends_the_run_with_one_line_and_the_last_checkpoint(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = files._write_bytes

    def refuse(path: Path, data: bytes) -> None:
        if (tmp_path / "run" / "checkpoints" / "latest").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_bytes", refuse)
        said = command(*TINY, "--out", "run")
    assert said.code == 1
    assert said.out == ""
    assert "No space left on device" in said.err.splitlines()[-1]
    assert "Traceback" not in said.err
    resumed = command("train", "--resume", "--json", "--out", "run")
    assert json.loads(resumed.out)["rounds"] == 2


def test_a_greedy_evaluation_is_part_of_what_is_told(command: Command) -> None:
    asked = ("--set", "evaluate_every=1", "--set", "evaluation_seeds=2")
    said = command(*TINY, "--rounds", 1, *asked, "--out", "run")
    assert said.code == 0, said.err
    assert "greedy: 2 episodes after round 1" in said.out
    assert "greedy val gain " in said.err
    shown = command("train", "--resume", "--json", "--out", "run")
    document = json.loads(shown.out)
    assert document["report"] == "run/report.html"
    assert document["evaluation"]["episodes"] == 2
