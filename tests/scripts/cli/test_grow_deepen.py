"""`esper grow --deepen`, and what other commands say of such a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from esper.leyline.records import EpochRecord
from esper.nissa.folder import GROWING, Checkpoints
from tests.scripts.cli.terminal import Said, esper

SHORT = ("--epochs", 5, "--decide-every", 6, "--batch-size", 8, "--keep", "last")
SOURCES = ("grow", "--task", "sources", *SHORT)

MODEL = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
    def forward(self, x):
        return x + torch.relu(self.conv(x))

def make(blocks=4):
    body = nn.Sequential(*(Residual() for _ in range(blocks)))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), body, nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(4, 3))
"""

Command = Callable[..., Said]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run from a folder with a model and data for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.delenv("ESPER_DATA", raising=False)
    draw = np.random.default_rng(0)
    np.savez(
        "images.npz",
        x=draw.normal(size=(60, 1, 8, 8)).astype(np.float32),
        y=draw.integers(3, size=60),
    )
    Path("net.py").write_text(MODEL)
    return lambda *arguments: esper(capsys, *arguments)


def blocks_awake(run: Path) -> list[int]:
    state = Checkpoints(run, GROWING).load()
    assert state is not None
    history = [EpochRecord.from_mapping(one) for one in state["gardener"]["history"]]
    return [sum(one.depth.awake.values()) for one in history if one.depth is not None]


def test_a_task_is_deepened_and_every_command_tells_of_it(command: Command, tmp_path: Path) -> None:
    said = command(*SOURCES, "--deepen", "--out", "runs/deep")
    assert said.code == 0, said.err
    assert "Deepened: sources" in said.out
    assert "4 of 4" in said.out
    assert "% of the" in said.out
    assert "epoch 1: DEEPEN layers (schedule: 1 to 2 blocks after step 6" in said.err
    assert "ETA" in said.err
    run = tmp_path / "runs" / "deep"
    assert blocks_awake(run) == [1, 2, 4, 4, 4]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["controller"] == "wait"
    assert settings["growth"]["deepen"]["controller"] == "schedule"
    assert settings["growth"]["twin"] is False

    listed = json.loads(command("runs", "--json").out)["runs"]
    assert [(one["controller"], one["state"]) for one in listed] == [("schedule", "finished")]
    again = command(*SOURCES, "--deepen-start", 2, "--out", "runs/two")
    assert again.code == 0, again.err
    assert blocks_awake(tmp_path / "runs" / "two") == [2, 2, 4, 4, 4]
    compared = command("compare", "runs/deep", "runs/two")
    assert "blocks awake" in compared.out
    assert "of the static network's" in compared.out
    sides = json.loads(command("compare", "runs/deep", "runs/two", "--json").out)["runs"]
    assert [side["stacks"] for side in sides] == 2 * [[{"name": "layers", "awake": 4, "blocks": 4}]]
    asked = command("query", "runs/deep", "SELECT step, awake FROM stacks", "--csv")
    assert asked.out.split() == ["step,awake", "1,1", "2,2", "3,4", "4,4", "5,4"]
    assert command("report", "runs/deep").code == 0

    more = command("grow", "--resume", "--epochs", 6, "--json", "--out", "runs/deep")
    assert more.code == 0, more.err
    document = json.loads(more.out)
    assert document["epochs"] == 6
    assert document["stacks"] == [{"name": "layers", "awake": 4, "blocks": 4}]
    assert 0 < document["training_flops"] < document["static_flops"]
    assert "--deepen" in command("grow", "--resume", "--deepen", "--out", "runs/deep").complaint()


def test_a_model_of_ones_own_is_deepened_and_then_deepened_further(command: Command) -> None:
    mine = ("grow", "--model", "net.py:make", "--data", "images.npz", *SHORT)
    said = command(*mine, "--deepen-start", 1, "--twin", "--set", "growth.deepen.at={0.5: 2}",
                   "--out", "two", "--json")  # fmt: skip
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["stacks"] == [{"name": "1", "awake": 2, "blocks": 4}]
    assert document["twin_test_score"] is not None
    deeper = command(*mine, "--deepen", "--set", "growth.deepen.weights=two", "--json")
    assert deeper.code == 0, deeper.err
    assert json.loads(deeper.out)["stacks"] == [{"name": "1", "awake": 4, "blocks": 4}]
    assert json.loads(deeper.out)["parameters_before"] == document["parameters_after"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--deepen", "--slots", "layers.0"), "slots is for seeds"),
        (("--deepen", "--controller", "random"), "controller is for seeds"),
        (("--deepen", "--max-growth", "2"), "max_growth is for seeds"),
        (("--deepen-start", "9"), "9 blocks cannot be awake; there are only 4 in layers"),
        (("--deepen", "--set", "growth.deepen.at={2.5: 3}"), "between 0 and 1"),
        (
            ("--deepen", "--set", "growth.deepen.order=mixed"),
            "must be one of 'stack', 'interleave'",
        ),
        (("--deepen", "--set", "growth.deepen.weights=none.pt"), "there is no file or folder"),
        (("--set", "growth.deepen.start=2"), "growth.deepen.start"),
        (("--deepen-controller", "luck"), "'luck' is not known"),
    ],
)
def test_a_wrong_request_is_one_line(
    options: tuple[str, ...], problem: str, command: Command
) -> None:
    assert problem in command(*SOURCES, *options).complaint()


def test_a_host_without_a_stack_says_so(command: Command) -> None:
    told = command("grow", "--task", "digits", "--deepen", "--epochs", 2).complaint()
    assert "no stack that can be deepened" in told
