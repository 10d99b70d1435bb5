"""`--wandb`, with a W&B that notes what it is told, and once with W&B itself, offline."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from esper.nissa import open_run
from tests.scripts.cli.terminal import Said, environment, esper, esper_process
from tests.scripts.cli.test_train import TINY

pytestmark = pytest.mark.filterwarnings("ignore:.*too few to grow in")

GROW = ("grow", "--task", "digits_mlp", "--no-twin", "--epochs", 2)

Command = Callable[..., Said]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run from an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: esper(capsys, *arguments)


def test_a_run_without_a_folder_gets_one_that_nobody_has(command: Command, tmp_path: Path) -> None:
    for expected in ("runs/digits_mlp", "runs/digits_mlp-2"):
        said = command(*GROW, "--json")
        assert json.loads(said.out)["report"] == f"{expected}/report.html"
        assert (tmp_path / expected / "config.yaml").is_file()


class FakeWandb(ModuleType):
    """W&B as far as the sink knows it."""

    def __init__(self, mode: str) -> None:
        super().__init__("wandb")
        self.mode = mode
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self) -> bool:
        raise RuntimeError("No API key configured.")

    def Settings(self, **settings: Any) -> Any:
        return settings

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        return SimpleNamespace(
            define_metric=lambda *_, **__: None,
            log=self.logged.append,
            alert=lambda **_: None,
            finish=lambda exit_code: self.finished.append(exit_code),
        )


def fake(monkeypatch: pytest.MonkeyPatch, mode: str) -> FakeWandb:
    module = FakeWandb(mode)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize("start", [GROW, TINY], ids=["grow", "train"])
def test_wandb_is_told_what_the_store_is(
    start: tuple[object, ...], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = fake(monkeypatch, "offline")
    assert command(*start, "--wandb", "--out", "run").code == 0
    with open_run(tmp_path / "run") as stored:
        assert [each["id"] for each in wandb.begun] == [stored.info.run_id]
        score = "charts/val_score" if start is GROW else "charts/return_mean"
        told = [entry[score] for entry in wandb.logged if score in entry]
        table, column = ("epochs", "val_score") if start is GROW else ("rounds", "return_mean")
        assert told == [row[column] for row in stored.rows(table)]
    assert wandb.finished == [0]
    assert (tmp_path / "run" / "tb").is_dir()
    key = "growth.epochs=3" if start is GROW else "rounds=3"
    verb = start[0]
    assert command(verb, "--resume", "--set", key, "--wandb", "--out", "run").code == 0
    assert [each["id"] for each in wandb.begun] == [wandb.begun[0]["id"]] * 2


def test_without_being_asked_wandb_is_left_alone(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = fake(monkeypatch, "online")
    assert command(*GROW, "--out", "run").code == 0
    assert wandb.begun == []


@pytest.mark.parametrize("start", [GROW, TINY], ids=["grow", "train"])
def test_wandb_that_cannot_work_is_refused_before_there_is_a_folder(
    start: tuple[object, ...], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, "online")
    told = command(*start, "--wandb", "--out", "run").err.splitlines()[-1]
    assert "No API key configured; run `wandb login`, or set WANDB_MODE=offline" in told
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = command(*start, "--wandb", "--out", "run").err.splitlines()[-1]
    assert "pip install 'esper-grow[wandb]'" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="W&B is not installed")
def test_wandb_itself_works_offline(tmp_path: Path) -> None:
    own = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }
    run = tmp_path / "run"
    said = esper_process(*GROW, "--wandb", "--out", run, env=environment(**own))
    assert said.code == 0, said
    assert "alarm" not in said.err
    [file] = (run / "wandb").glob("offline-run-*/*.wandb")
    assert b"charts/val_score" in file.read_bytes()
