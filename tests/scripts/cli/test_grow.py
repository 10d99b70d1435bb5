from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from esper.growth import recorded as growing
from esper.growth.recorded import RecordedGrowth
from esper.growth.run import GrowthLoop
from esper.kasmina.garden import load_garden
from esper.lab.tasks import get_task
from esper.lab.tasks.request import GrowSettings
from esper.leyline.records import EpochRecord
from esper.nissa import recorded
from esper.nissa.folder import GROWING, Checkpoints
from esper.nissa.reader import open_run
from esper.scripts.cli import views as grow_view
from esper.utils import files
from tests.plots import plain_history, same
from tests.scripts.cli.terminal import Said, esper

# Most runs here are shorter than any seed's life, which is not what they are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*too few to grow in")

FAST = ("grow", "--task", "digits_mlp", "--no-twin")
PLAN = """\
- {epoch: 1, op: germinate, slot: r0c0, blueprint: norm}
- {epoch: 2, op: advance, slot: 0}
"""

Command = Callable[..., Said]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    return lambda *arguments: esper(capsys, *arguments)


def state_of(run: Path) -> dict[str, Any]:
    state = Checkpoints(run, GROWING).load()
    assert state is not None
    return state


def history_of(run: Path) -> list[dict[str, Any]]:
    return plain_history(
        [EpochRecord.from_mapping(record) for record in state_of(run)["gardener"]["history"]]
    )


def epochs_trained(run: Path) -> list[int]:
    """Return the epochs in the log, in order; one that was trained twice is there twice."""
    words = [line.split() for line in (run / "log.txt").read_text().splitlines()]
    return [int(line[2]) for line in words if line[1] == "epoch"]


def without_time(document: dict[str, Any]) -> dict[str, Any]:
    left_out = ("seconds", "run", "report", "exported")
    return {key: value for key, value in document.items() if key not in left_out}


# ---------------------------------------------------------------------------------- what it leaves


@pytest.mark.parametrize("controller", ["wait", "random", "heuristic", "schedule:plan.yaml"])
def test_a_run_with_every_controller(controller: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    said = command(
        "grow", "--task", "digits", "--epochs", 4, "--controller", controller, "--out", "run"
    )
    assert said.code == 0, said.err
    assert "Grown: digits" in said.out
    assert "twin (only waits)" in said.out
    assert "gain over the twin" in said.out
    assert "report: run/report.html" in said.out
    assert "epoch 4/4" in said.err
    run = tmp_path / "run"
    assert sorted(entry.name for entry in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "grown",
        "log.txt",
        "report.html",
        "run.db",
        "run.db.lock",
        "summary.json",
        "tb",
    ]
    log = (run / "log.txt").read_text().splitlines()
    assert log[0].endswith(f"--controller {controller} --out run")
    assert epochs_trained(run) == [1, 2, 3, 4]
    assert "result: epoch " in log[-2]
    assert log[-1].endswith("finished")
    history = history_of(run)
    assert [record["epoch"] for record in history] == [1, 2, 3, 4]
    assert all(record["twin_score"] is not None for record in history)
    if controller.startswith("schedule"):
        ops = [record["decision"] and record["decision"]["op"] for record in history]
        assert ops == ["GERMINATE", "ADVANCE", "WAIT", None]
        assert "if the seed were removed now" in said.out
        assert "norm" in said.out
    if controller == "wait":
        assert "The controller germinated nothing." in said.out


def test_the_document_is_all_there_is_on_standard_output(command: Command, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    said = command(
        *("grow", "--task", "digits_mlp", "--epochs", 4, "--seed", 3, "--json", "--export", "pt2"),
        *("--controller", "schedule:plan.yaml", "--out", "run"),
    )
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["task"] == "digits_mlp"
    assert (document["epochs"], document["seed"]) == (4, 3)
    # A seed that is still in training when the run ends is not part of what it leaves.
    assert document["seeds"][0]["fate"] == "dropped"
    assert document["parameters_after"] == document["parameters_before"]
    assert 0 < document["test_score"] <= 100
    assert document["twin_test_score"] is not None
    assert document["seeds"][0]["blueprint"] == "norm"
    assert set(document["contributions"]) >= {"all_off", "leave_one_out", "solo_on", "shapley"}
    for key in ("report", "exported"):
        assert Path(document[key]).is_file()
    assert document == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_the_settings_are_complete_and_make_the_same_run_again(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    arguments = (
        *("grow", "--task", "digits_mlp", "--slots", "r0c0, r0c1", "--epochs", 3, "--seed", 5),
        *("--controller", "schedule:plan.yaml", "--learning-rate", 0.02, "--batch-size", 48),
        *("--schedule", "cosine", "--optimizer", "adamw", "--weight-decay", 0.05),
        *("--set", "growth.training.seed_rate=own", "--set", "growth.training.seed_warmup=3"),
        *("--set", "growth.garden.training_mode=shadow", "--no-twin", "--max-seeds", 2),
        *("--set", "growth.garden.lifecycle.gates.kind=strict", "--max-parameters", 9000),
        *("--max-added-flops", 8000, "--set", "growth.gardener.ablate_every=2"),
    )
    said = command(*arguments, "--json", "--out", "run")
    assert said.code == 0, said.err
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    settings = GrowSettings.from_mapping(written)
    assert settings.to_mapping() == written
    assert settings.slots == ("r0c0", "r0c1")
    assert settings.growth.training.to_mapping() == {
        "batch_size": 48,
        "optimizer": "adamw",
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "schedule": "cosine",
        "warmup": 0.05,
        "decay": 0.2,
        "seed_rate": "own",
        "seed_factor": 1.0,
        "seed_warmup": 3,
    }
    growth, garden = settings.growth, settings.growth.garden
    assert (growth.epochs, growth.seed, growth.twin) == (3, 5, False)
    assert growth.gardener.ablate_every == 2
    assert garden.training_mode == "shadow"
    assert (garden.max_parameters, garden.max_added_flops) == (9000, 8000)
    assert garden.lifecycle.rules.max_seeds == 2
    assert garden.lifecycle.gates.kind == "strict"
    # Paths mean the same from anywhere.
    assert settings.controller == f"schedule:{tmp_path / 'plan.yaml'}"

    again = list(GrowthLoop(settings.request()).epochs())
    assert plain_history(again) == history_of(tmp_path / "run")


def test_the_grown_network_can_be_loaded(command: Command, tmp_path: Path) -> None:
    said = command(*FAST, "--epochs", 3, "--controller", "random", "--seed", 2, "--out", "run")
    assert said.code == 0, said.err
    task = get_task("digits_mlp")
    garden = load_garden(tmp_path / "run" / "grown", model=task.build_host(99))
    saved = {
        key: value
        for key, value in state_of(tmp_path / "run")["gardener"]["garden"].items()
        if key != "_extra_state"
    }
    assert same({key: garden.state_dict()[key] for key in saved}, saved)
    document = json.loads((tmp_path / "run" / "summary.json").read_text())
    data = task.load()
    x, y = data.batch("test", torch.arange(data.size("test")))
    with torch.no_grad():
        right = (garden.eval()(x).argmax(1) == y).double().mean()
    assert 100 * float(right) == pytest.approx(document["test_score"])


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_an_export_stands_beside_the_network(kind: str, command: Command, tmp_path: Path) -> None:
    said = command(
        *FAST, "--epochs", 1, "--controller", "wait", "--export", kind, "--json", "--out", "r"
    )
    assert said.code == 0, said.err
    path = Path(json.loads(said.out)["exported"])
    assert path == Path("r") / f"grown.{kind}"
    images = torch.randn(3, 1, 8, 8)
    garden = load_garden("r/grown", model=get_task("digits_mlp").build_host(0)).eval()
    if kind == "pt2":
        out = torch.export.load(path).module()(images)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: images.numpy()}
        out = torch.from_numpy(np.asarray(session.run(None, feed)[0]))
    with torch.no_grad():
        torch.testing.assert_close(out, garden(images), rtol=0, atol=1e-5)


def test_every_decision_can_be_shown(command: Command) -> None:
    said = command(*FAST, "--epochs", 3, "--controller", "wait", "-v", "--out", "run")
    assert said.err.count("WAIT") == 2
    quiet = command(*FAST, "--epochs", 3, "--controller", "wait", "--out", "other")
    assert "WAIT" not in quiet.err


# ---------------------------------------------------------------------------------- one's own model


@pytest.fixture
def own_model(tmp_path: Path) -> Iterator[Path]:
    """A model of one's own with data of one's own, in the current folder."""
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(),\n"
        "        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))\n"
        "def normed():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),\n"
        "        nn.Linear(64, 3))\n"
    )
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = (rng.normal(size=(120, 6, 6)) + y[:, None, None]).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    np.savez(tmp_path / "wide.npz", x=np.zeros((60, 9, 9), np.float32), y=y[:60])
    np.savez(tmp_path / "many.npz", x=x, y=np.arange(120) % 7)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("own_net", None)


def test_ones_own_model_grows_from_beginning_to_end(command: Command, own_model: Path) -> None:
    plan = "".join(
        f"- {{epoch: {epoch}, op: {op}, slot: '2'{more}}}\n"
        for epoch, op, more in ((1, "germinate", ", blueprint: conv_light"), (2, "advance", ""))
    )
    (own_model / "plan.yaml").write_text(plan)
    said = command(
        *("grow", "--model", "own_net:make", "--data", "data.npz", "--slots", "0,2"),
        *("--epochs", 4, "--controller", "schedule:plan.yaml", "--json", "--out", "run"),
    )
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["task"] == "own_net:make"
    assert 0 < document["val_score"] <= 100
    assert document["twin_val_score"] is not None
    assert [seed["slot"] for seed in document["seeds"]] == ["2"]
    settings = yaml.safe_load((own_model / "run" / "config.yaml").read_text())
    assert settings["data"] == str(own_model / "data.npz")
    assert settings["slots"] == ["0", "2"]
    line = command("grow", "--resume", "--out", "run", "--json").complaint()
    assert "esper grow --resume --model own_net:make --out run" in line
    resumed = command("grow", "--resume", "--model", "own_net:make", "--out", "run", "--json")
    assert resumed.code == 0


def test_new_statistics_of_batch_norm_are_on_the_record(command: Command, own_model: Path) -> None:
    said = command(
        *("grow", "--model", "own_net:normed", "--data", "data.npz", "--slots", "0"),
        *("--epochs", 2, "--controller", "wait", "--out", "run"),
    )
    assert said.code == 0, said.err
    assert "warning" not in said.err
    log = (own_model / "run" / "log.txt").read_text()
    (samples,) = set(re.findall(r"epoch \d .*  BatchNorm statistics from (\d+) samples", log))
    with open_run(own_model / "run") as stored:
        told = [row["statistics_samples"] for row in stored.rows("epochs")]
    assert told == [int(samples)] * 2


def test_what_is_kept_and_when_it_stops_can_be_said(command: Command, own_model: Path) -> None:
    grow = (*("grow", "--model", "own_net:make", "--data", "data.npz"), "--controller", "wait")
    flat = ("--learning-rate", 1e-12, "--epochs", 9, "--json")
    for keep, kept in (("best", 1), ("last", 4)):
        said = command(*grow, *flat, "--keep", keep, "--patience", 3, "--out", keep)
        summary = json.loads(said.out)
        assert (summary["kept_epoch"], summary["epochs"]) == (kept, 4)
        assert summary["stopped"] == "no better validation score in 3 epochs"
    said = command(*grow, *flat[:-1], "--patience", 3, "--out", "best", "--overwrite")
    assert "epoch 1 kept, the best validated of 4; stopped early: no better" in said.out
    assert "epoch 1 kept, the best validated of 4" in (own_model / "best/log.txt").read_text()
    again = ("grow", "--resume", "--model", "own_net:make", "--out", "best", "--json")
    assert json.loads(command(*again).out)["epochs"] == 4
    more = json.loads(command(*again, "--patience", 0, "--epochs", 6, "--keep", "last").out)
    assert (more["kept_epoch"], more["epochs"], more["stopped"]) == (6, 6, "")
    line = command(*again, "--set", "growth.epochs=1").complaint()
    assert "best has already trained 6 epochs, more than epochs=1" in line
    assert yaml.safe_load((own_model / "best/config.yaml").read_text())["growth"]["epochs"] == 6


@pytest.mark.parametrize("asked", [("--slots", "auto"), ()])
def test_slots_that_look_best_are_found(
    command: Command, own_model: Path, asked: tuple[str, ...]
) -> None:
    said = command(
        *("grow", "--model", "own_net:make", "--data", "data.npz", *asked),
        *("--axes", "1=BCHW,3=BCHW", "--decide-every", 1, "--epochs", 3),
        *("--controller", "wait", "--out", "run"),
    )
    assert said.code == 0, said.err
    log = (own_model / "run" / "log.txt").read_text()
    assert "epoch 3 " in log
    settings = yaml.safe_load((own_model / "run" / "config.yaml").read_text())
    assert (settings["slots"], settings["axes"]) == (list(asked[1:]), "1=BCHW,3=BCHW")
    assert settings["growth"]["decide_every"] == 1
    assert (
        command("grow", "--resume", "--model", "own_net:make", "--out", "run", "--json").code == 0
    )


def test_why_nothing_grew_is_told_below_the_tables_and_in_the_report(
    command: Command, tmp_path: Path
) -> None:
    said = command(*FAST, "--epochs", 8, "--max-parameters", 1, "--out", "run")
    assert said.code == 0, said.err
    assert "Nothing grew: the controller waited in 7 of 7 decisions: 7 because no slot could" in (
        said.out
    )
    assert "To change that: raise the limits" in said.out
    assert (
        "no blueprint fits within the limits; raise max_growth"
        in (tmp_path / "run" / "report.html").read_text()
    )
    document = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert document["why"][0].startswith("Nothing grew")


# ---------------------------------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "no task": (("grow", "--out", "run"), "give either --task T or --model MODULE:FACTORY"),
    "continuing nothing": (("grow", "--resume"), "--resume needs --out RUN"),
    "replacing nothing": ((*FAST, "--overwrite"), "--overwrite needs --out RUN"),
    "wrong axes": ((*FAST, "--axes", "XYZ", "--out", "run"), "axes cannot be 'XYZ'"),
    "half of an axis": (
        (*FAST, "--axes", "r0c0=", "--out", "run"),
        "--axes must be one name, or look like A=BTC,B=TBC, got 'r0c0='",
    ),
    "unknown task": (
        ("grow", "--task", "digts", "--out", "run"),
        "unknown task 'digts', did you mean 'digits'? known: ",
    ),
    "unknown option": (
        (*FAST, "--out", "run", "--epoch", 3),
        "unknown option '--epoch', did you mean '--epochs'?",
    ),
    "stray word": (("grow", "digits", "--out", "run"), "unexpected argument 'digits'"),
    "task and model": (
        (
            "grow",
            "--task",
            "digits",
            "--model",
            "own_net:make",
            "--data",
            "data.npz",
            "--out",
            "run",
        ),
        "give either --task T or --model",
    ),
    "model without data": (
        ("grow", "--model", "own_net:make", "--slots", "0", "--out", "run"),
        "--model needs --data PATH",
    ),
    "no factory": (
        ("grow", "--model", "own_net", "--data", "data.npz", "--out", "run"),
        "--model must look like MODULE:FACTORY or FILE.py:FACTORY, got 'own_net'",
    ),
    "unknown module": (
        ("grow", "--model", "own_nett:make", "--data", "data.npz", "--slots", "0", "--out", "run"),
        "cannot import 'own_nett'",
    ),
    "wrong slot of a model": (
        ("grow", "--model", "own_net:make", "--data", "data.npz", "--slots", "9", "--out", "run"),
        "no submodule '9'",
    ),
    "slot that is no activation": (
        ("grow", "--model", "own_net:make", "--data", "wide.npz", "--slots", "0", "--out", "run"),
        "the model cannot take a validation batch [6, 1, 9, 9]: RuntimeError: ",
    ),
    "too many classes": (
        ("grow", "--model", "own_net:make", "--data", "many.npz", "--slots", "0", "--out", "run"),
        "labels go from 0 to 6, but the model has 3 outputs, for classes 0 to 2",
    ),
    "wrong slot of a task": (
        (*FAST, "--slots", "r0c7", "--out", "run"),
        "has no slot 'r0c7', did you mean 'r0c",
    ),
    "wrong device": ((*FAST, "--device", "gpu", "--out", "run"), "choose from auto, cpu, cuda"),
    "no device": (
        (*FAST, "--device", "cuda", "--out", "run"),
        "this machine has no CUDA device; use --device cpu",
    ),
    "missing data": (
        ("grow", "--task", "cifar_baseline", "--data", "empty", "--out", "run"),
        "data_batch_1",
    ),
    "missing data file": (
        ("grow", "--model", "own_net:make", "--data", "gone.npz", "--slots", "0", "--out", "run"),
        "gone.npz does not exist",
    ),
    "no data but words": (
        ("grow", "--model", "own_net:make", "--data", "own_net.py", "--slots", "0", "--out", "run"),
        "own_net.py",
    ),
    "out is a file": ((*FAST, "--out", "data.npz"), "data.npz is a file; give a folder"),
    "out is in use": (
        (*FAST, "--out", "used"),
        "used is not empty and no run folder; give another",
    ),
    "overwriting a stranger": (
        (*FAST, "--overwrite", "--out", "used"),
        "used is not empty and no run folder",
    ),
    "out is too long": ((*FAST, "--out", "x" * 300), "cannot create the run folder"),
    "resuming nothing": (
        ("grow", "--resume", "--out", "gone"),
        "gone is not there, so it is not a run folder; give the --out of a run that was started",
    ),
    "resuming a stranger": (("grow", "--resume", "--out", "used"), "used is not a run folder"),
    "resuming a file": (("grow", "--resume", "--out", "data.npz"), "data.npz is a file"),
    "resuming and overwriting": (
        ("grow", "--resume", "--overwrite", "--out", "used"),
        "--resume continues a run and --overwrite replaces it; give one of them",
    ),
    "no such pretrained controller": (
        (*FAST, "--controller", "tamiyo:small", "--out", "run"),
        "there is no controller 'small': Esper ships tamiyo, and a folder must have a config.json",
    ),
    "unknown controller": (
        (*FAST, "--controller", "heuristc", "--out", "run"),
        "unknown controller 'heuristc', did you mean 'heuristic'?",
    ),
    "a path as controller": (
        (*FAST, "--controller", "used", "--out", "run"),
        "is no saved state: manifest.json is missing",
    ),
    "a missing schedule": (
        (*FAST, "--controller", "schedule:gone.yaml", "--out", "run"),
        "gone.yaml: there is no such schedule file",
    ),
    "a schedule without a file": (
        (*FAST, "--controller", "schedule", "--out", "run"),
        "controller 'schedule' needs a file; write 'schedule:plan.yaml'",
    ),
    "a wrong schedule": (
        (*FAST, "--controller", "schedule:wrong.yaml", "--out", "run"),
        "entry 1: field 'op' must be one of",
    ),
    "no epochs": ((*FAST, "--epochs", 0, "--out", "run"), "epochs must be at least 1, got 0"),
    "words for epochs": ((*FAST, "--epochs", "ten", "--out", "run"), "invalid int value: 'ten'"),
    "negative seed": ((*FAST, "--seed", -1, "--out", "run"), "seed must be at least 0, got -1"),
    "negative limit": (
        (*FAST, "--max-seeds", -2, "--out", "run"),
        "max_seeds must be at least 0, got -2",
    ),
    "no learning rate": (
        (*FAST, "--learning-rate", "nan", "--out", "run"),
        "learning_rate must be finite and above 0.0, got nan",
    ),
    "the rate of another optimizer": (
        (*FAST, "--optimizer", "adamw", "--out", "run"),
        "--optimizer adamw needs --learning-rate (0.001 to 0.005 suits it)",
    ),
    "negative warm-up": (
        (*FAST, "--set", "growth.training.seed_warmup=-1", "--out", "run"),
        "seed_warmup must be at least 0, got -1",
    ),
    "no batch": ((*FAST, "--batch-size", 0, "--out", "run"), "batch_size must be at least 1"),
    "unknown format": ((*FAST, "--export", "onx", "--out", "run"), "did you mean 'onnx'?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_would_be_right(
    mistake: str, command: Command, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_model / "used").mkdir()
    (own_model / "used" / "precious.txt").write_text("keep")
    (own_model / "empty").mkdir()
    (own_model / "wrong.yaml").write_text("- {epoch: 1, op: sow, slot: 0}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, message = MISTAKES[mistake]
    line = command(*arguments).complaint()
    assert message in line
    assert not (own_model / "run").exists()
    assert (own_model / "used" / "precious.txt").read_text() == "keep"


def test_missing_data_says_which_file_and_where_it_was_looked_for(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    line = command("grow", "--task", "fashion", "--data", "empty", "--out", "run").complaint()
    assert "train-images-idx3-ubyte" in line
    assert str(tmp_path / "empty") in line


def test_an_extra_that_is_missing_is_noticed_before_training(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    line = command(*FAST, "--export", "onnx", "--out", "run").complaint()
    assert "pip install 'esper-grow[export]'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    ["\x1b[2J\x1b[31mdigits", "digits\n\rowned", "\u202estigid", "[bold]x[/]", "d" * 20_000],
    ids=["escapes", "lines", "direction", "markup", "long"],
)
def test_hostile_names_are_shown_as_text(name: str, command: Command) -> None:
    for arguments in (
        ("grow", "--task", name, "--out", "run"),
        (*FAST, "--controller", name, "--out", "run"),
        (*FAST, "--controller", f"schedule:{name}", "--out", "run"),
        (*FAST, "--slots", name, "--out", "run"),
        ("grow", "--model", name, "--data", "x", "--out", "run"),
        ("grow", "--task", "digits", "--data", name, "--out", "run"),
        ("grow", "--resume", "--out", name),
        (name,),
    ):
        line = command(*arguments).complaint()
        assert len(line) < 1000


# ----------------------------------------------------------------------------------------- resuming


def interrupted(command: Command, out: str, after: int, *arguments: object) -> None:
    """Run a command that is told to stop during an epoch, as by Ctrl-C."""
    shown = grow_view.GrowthView.show

    def show(self: Any, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        shown(self, record, reasons)
        if record.epoch == after:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_view.GrowthView, "show", show)
        said = command(*arguments, "--out", out)
    assert said.code == 130, said.err
    assert said.out == ""
    assert f"interrupted after epoch {after}" in said.err
    assert f"esper grow --resume --out {out}" in said.err


def test_an_interrupted_run_goes_on_where_it_stopped(command: Command, tmp_path: Path) -> None:
    arguments = (
        "grow",
        "--task",
        "digits_mlp",
        "--epochs",
        6,
        "--controller",
        "random",
        "--seed",
        1,
    )
    whole = command(*arguments, "--json", "--out", "whole")
    assert whole.code == 0, whole.err
    interrupted(command, "run", 3, *arguments, "--json")
    assert len(history_of(tmp_path / "run")) == 3
    resumed = command("grow", "--resume", "--json", "--out", "run")
    assert resumed.code == 0, resumed.err
    assert epochs_trained(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert without_time(json.loads(resumed.out)) == without_time(json.loads(whole.out))
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")
    one, other = (state_of(tmp_path / name) for name in ("run", "whole"))
    assert same(one["gardener"]["garden"], other["gardener"]["garden"])
    assert same(one["twin"], other["twin"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(
    number: signal.Signals, command: Command, tmp_path: Path
) -> None:
    shown = grow_view.GrowthView.show

    def show(self: Any, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        shown(self, record, reasons)
        if record.epoch == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_view.GrowthView, "show", show)
        patch.setattr(recorded, "SAME_REQUEST_S", -1.0)
        said = command(*FAST, "--epochs", 4, "--controller", "wait", "--out", "run")
    assert said.code == 130
    last = said.err.splitlines()[-1]
    assert last == "interrupted after epoch 1; continue with: esper grow --resume --out run"
    assert len(history_of(tmp_path / "run")) == 1
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert command("grow", "--resume", "--out", "run").code == 0


def test_a_signal_that_comes_while_a_run_opens_is_heeded_after_the_first_epoch(
    command: Command, tmp_path: Path
) -> None:
    opened = growing.open_growth

    def open_slowly(*arguments: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return opened(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "open_growth", open_slowly)
        said = command(*FAST, "--epochs", 4, "--controller", "wait", "--out", "run")
    assert said.code == 130
    assert len(history_of(tmp_path / "run")) == 1
    assert command("grow", "--resume", "--out", "run").code == 0


def test_a_run_that_is_terminated_can_be_resumed(command: Command, tmp_path: Path) -> None:
    shown = grow_view.GrowthView.show

    def show(self: Any, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        shown(self, record, reasons)
        if record.epoch == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_view.GrowthView, "show", show)
        said = command(*FAST, "--epochs", 4, "--controller", "wait", "--out", "run")
    assert said.code == 130
    assert len(history_of(tmp_path / "run")) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_may_have_any_name(command: Command, tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xffn \x1b[31m'\n[b]")
    said = command(*FAST, "--epochs", 1, "--controller", "wait", "--json", "--out", name)
    assert said.code == 0, said.err
    assert json.loads(said.out)["run"] == name
    assert (tmp_path / name / "report.html").is_file()
    assert len((tmp_path / name / "log.txt").read_text(encoding="utf-8").splitlines()) == 4
    shown = command("grow", "--resume", "--out", name)
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out


def test_a_narrow_terminal_is_enough(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = command(*FAST, "--epochs", 2, "--controller", "random", "--seed", 2, "--out", "run")
    assert said.code == 0, said.err
    assert max(map(len, said.out.splitlines())) <= 60


def test_a_path_to_be_typed_again_is_not_broken(command: Command, tmp_path: Path) -> None:
    out = "a folder with a name that is too long to fit into one line of an ordinary terminal " * 2
    arguments = (*FAST, "--epochs", 3, "--controller", "wait", "--out", out.strip())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            grow_view.GrowthView,
            "show",
            lambda self, record, reasons: signal.raise_signal(signal.SIGINT),
        )
        said = command(*arguments)
    assert said.code == 130
    assert f"esper grow --resume --out '{out.strip()}'\n" in said.err


def test_a_finished_run_can_be_finished_again(command: Command, tmp_path: Path) -> None:
    first = command(*FAST, "--epochs", 2, "--controller", "random", "--json", "--out", "run")
    again = command("grow", "--resume", "--json", "--export", "pt2", "--out", "run")
    assert again.code == 0, again.err
    assert without_time(json.loads(again.out)) == without_time(json.loads(first.out))
    assert (tmp_path / "run" / "grown.pt2").is_file()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (("--seed", 0), "--seed"),
        (("--no-twin",), "--twin"),
        (("--twin",), "--twin"),
        (("--task", "digits"), "--task"),
        (("--controller", "wait"), "--controller"),
        (("--max-seeds", 0), "--max-seeds"),
    ],
)
def test_a_resumed_run_keeps_its_settings(
    option: tuple[object, ...], name: str, command: Command
) -> None:
    line = command("grow", "--resume", "--out", "run", *option).complaint()
    assert f"--resume keeps the settings of the run; leave out {name}" in line


def test_a_finished_run_is_extended(command: Command, tmp_path: Path) -> None:
    controller = ("--controller", "wait")
    assert command(*FAST, "--epochs", 2, *controller, "--out", "run").code == 0
    said = command("grow", "--resume", "--epochs", 4, "--json", "--out", "run")
    assert said.code == 0, said.err
    assert epochs_trained(tmp_path / "run") == [1, 2, 3, 4]
    assert len(history_of(tmp_path / "run")) == 4


def test_settings_that_were_damaged_are_named(command: Command, tmp_path: Path) -> None:
    command(*FAST, "--epochs", 1, "--controller", "wait", "--out", "run")
    path = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["growth"]["epochs"] = "many"
    path.write_text(yaml.safe_dump(settings))
    said = command("grow", "--resume", "--out", "run")
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert "config.yaml: GrowthConfig.epochs must be a whole number, got 'many'" in said.err
    path.write_text("task: [")
    said = command("grow", "--resume", "--out", "run")
    assert said.code == 1
    assert "config.yaml cannot be read" in said.err


def test_a_damaged_checkpoint_is_named(command: Command, tmp_path: Path) -> None:
    command(*FAST, "--epochs", 1, "--controller", "wait", "--out", "run")
    tree = tmp_path / "run" / "checkpoints" / "latest" / "state" / "tree.json"
    tree.write_bytes(tree.read_bytes()[:-20])
    said = command("grow", "--resume", "--out", "run")
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert "is damaged: tree.json has" in said.err


def test_a_run_that_never_saved_begins_anew(command: Command, tmp_path: Path) -> None:
    whole = command(*FAST, "--epochs", 2, "--controller", "random", "--json", "--out", "whole")
    (tmp_path / "run").mkdir()
    settings = (tmp_path / "whole" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(settings)
    resumed = command("grow", "--resume", "--json", "--out", "run")
    assert resumed.code == 0, resumed.err
    assert without_time(json.loads(resumed.out)) == without_time(json.loads(whole.out))


def test_overwriting_starts_from_nothing(command: Command, tmp_path: Path) -> None:
    command(*FAST, "--epochs", 2, "--controller", "wait", "--out", "run")
    (tmp_path / "run" / "mine.txt").write_text("keep")
    said = command(*FAST, "--epochs", 1, "--controller", "wait", "--overwrite", "--out", "run")
    assert said.code == 0, said.err
    assert len(history_of(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"


def test_a_wrong_request_does_not_destroy_the_run_it_would_replace(
    command: Command, tmp_path: Path
) -> None:
    command(*FAST, "--epochs", 1, "--controller", "wait", "--out", "run")
    command(*FAST, "--controller", "nobody", "--overwrite", "--out", "run").complaint()
    assert len(history_of(tmp_path / "run")) == 1


# ---------------------------------------------------------------------------- failing while it runs


def test_a_full_disk_ends_the_run_with_one_line_and_the_last_checkpoint(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = files._write_bytes

    def refuse(path: Path, data: bytes) -> None:
        if "state" in str(path) and (tmp_path / "run" / "checkpoints" / "latest").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(RecordedGrowth, "is_due", lambda self, step: True)
    monkeypatch.setattr(files, "_write_bytes", refuse)
    said = command(*FAST, "--epochs", 4, "--controller", "wait", "--out", "run")
    assert said.code == 1
    assert said.out == ""
    assert "No space left on device; free some space" in said.err.splitlines()[-1]
    assert "Traceback" not in said.err
    monkeypatch.undo()
    assert len(history_of(tmp_path / "run")) == 1


@pytest.mark.filterwarnings("default:epoch")
def test_a_loss_that_keeps_exploding_ends_the_run_with_one_line(command: Command) -> None:
    said = command(
        *FAST, "--epochs", 3, "--learning-rate", 1e30, "--controller", "wait", "--out", "run"
    )
    assert said.code == 1
    assert "was not finite in 3 epochs in a row" in said.err
    assert said.err.splitlines()[-1].startswith("esper: ")
    assert "Traceback" not in said.err
