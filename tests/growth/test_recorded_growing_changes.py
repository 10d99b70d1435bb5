"""A growing run that is continued in a changed world: noticed, refused, or recorded."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from esper.growth.config import GrowthConfig
from esper.growth.grow import grow
from esper.growth.recorded import RecordedGrowth, open_growth
from esper.growth.request import GrowRequest
from esper.lab.tasks.request import GrowSettings, growth_of, request_again
from esper.leyline.errors import ConfigError, EsperWarning, UsageError, as_command
from esper.nissa.folder import GROWING, Checkpoints
from esper.nissa.listing import RunEntry, describe_run
from esper.nissa.reader import open_run
from esper.nissa.recorded import RunInputs
from tests.plots import same

SCHEDULE = "- {epoch: 2, op: germinate, slot: 0, blueprint: norm}\n"


def write_data(path: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez(path, x=x, y=y)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a schedule, a model, and a run that was stopped after two epochs."""
    place = tmp_path_factory.mktemp("world")
    write_data(place / "data.npz")
    (place / "plan.yaml").write_text(SCHEDULE)
    (place / "worldly_net.py").write_text(
        "from torch import nn\n"
        "calls = []\n"
        "def make():\n"
        "    calls.append(1)\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    sys.path.insert(0, str(place))
    run = start(place)
    left = [2]

    def is_stopped() -> bool:
        left[0] -= 1
        return left[0] <= 0

    with run:
        assert not run.carry_out(is_stopped=is_stopped)
    return place


def start(place: Path) -> RecordedGrowth:
    growth = growth_of(None).replace(epochs=4, seed=5)
    settings = GrowSettings(
        model="worldly_net:make",
        slots=("0",),
        data=str(place / "data.npz"),
        controller=f"schedule:{place / 'plan.yaml'}",
        growth=growth,
    )
    return open_growth(settings.request(), place / "run", sinks=())


@pytest.fixture
def place(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the run, in which data and schedule may be changed where they were."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    return tmp_path


def resume(
    place: Path, *, model: str | None = "worldly_net:make", settings: dict[str, Any] | None = None
) -> RecordedGrowth:
    request = request_again(place / "run", settings or {}, model=model)
    return open_growth(request, place / "run", resume="latest", sinks=())


def edit(place: Path, key: str, value: Any) -> None:
    path = place / "run" / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    *outer, last = key.split(".")
    inner = settings
    for name in outer:
        inner = inner[name]
    inner[last] = value
    path.write_text(yaml.safe_dump(settings))


def listed(place: Path) -> RunEntry:
    """Return the run as `esper runs` lists it."""
    return describe_run(place / "run")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    with open_run(run) as stored:
        return stored.rows("events", where="kind = ?", parameters=[kind])


def test_nothing_changed_is_nothing_told(place: Path) -> None:
    with resume(place) as run:
        assert run.carry_out()
    assert events(place / "run", "settings_changed") == []
    assert events(place / "run", "versions_changed") == []


# -------------------------------------------------------------------------------------------- code


def test_a_folder_alone_runs_no_code(place: Path, stopped: Path) -> None:
    """A run folder is data that people send each other."""
    edit(place, "model", "evil_module:make")
    (stopped / "evil_module.py").write_text("raise SystemExit('this was run')\n")
    with pytest.raises(UsageError, match=r"confirm it to continue: .*--model evil_mod"):
        resume(place, model=None)
    with pytest.raises(UsageError, match=r"started with the model 'evil_module:make', not with"):
        resume(place)
    assert "evil_module" not in sys.modules


def test_a_model_is_named_again_to_go_on(place: Path) -> None:
    with pytest.raises(UsageError, match=r"esper grow --resume --model worldly_net:make --out"):
        resume(place, model=None)
    with resume(place) as run:
        assert run.carry_out()


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("growth.seed", 6),
        ("growth.twin", False),
        ("growth.training.momentum", 0.5),
        ("growth.garden.training_mode", "shadow"),
        ("slots", ["2"]),
    ],
)
@pytest.mark.parametrize("way", ["edited", "set"])
def test_what_makes_it_another_run_is_refused(place: Path, key: str, value: Any, way: str) -> None:
    settings = {key: value} if way == "set" else {}
    if way == "edited":
        edit(place, key, value)
    before = (place / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=rf"{key} is .* cannot become .*; start a new run"):
        resume(place, settings=settings)
    assert (place / "run" / "config.yaml").read_text() == before


@pytest.mark.parametrize("way", ["edited", "set"])
def test_a_change_that_is_allowed_is_made_and_recorded(place: Path, way: str) -> None:
    changes = {"growth.epochs": 6, "growth.training.learning_rate": 0.02}
    if way == "edited":
        for key, value in changes.items():
            edit(place, key, value)
    with resume(place, settings=changes if way == "set" else {}) as run:
        assert run.carry_out()
        assert run.growth.gardener.epoch == 6
        growth = run.growth
        assert growth.twin is not None
        for one in (growth.trainee, growth.twin):
            assert {group["lr"] for group in one.optimizer.param_groups} == {0.02}
    (event,) = events(place / "run", "settings_changed")
    assert event["data"]["settings"] == {
        "growth.epochs": [4, 6],
        "growth.training.learning_rate": [0.01, 0.02],
    }
    written = yaml.safe_load((place / "run" / "config.yaml").read_text())
    assert written["growth"]["epochs"] == 6
    assert (listed(place).done, listed(place).planned) == (6, 6)
    # It is made once: whoever continues now has it, and is told nothing.
    with resume(place):
        pass
    assert len(events(place / "run", "settings_changed")) == 1


# ----------------------------------------------------------------------------- data and controller


@pytest.fixture
def changed(stopped: Path) -> Any:
    """Put data and schedule back after the test."""
    kept = {name: (stopped / name).read_bytes() for name in ("data.npz", "plan.yaml")}
    yield stopped
    for name, data in kept.items():
        (stopped / name).write_bytes(data)


def test_other_data_is_noticed(place: Path, changed: Path) -> None:
    write_data(changed / "data.npz", seed=1)
    with as_command(), pytest.raises(UsageError, match=r"data of .* changed since.*--set data="):
        resume(place)
    with resume(place, settings={"data": str(changed / "data.npz")}) as run:
        assert run.carry_out()


def test_the_same_data_elsewhere_is_a_change_of_settings(place: Path, stopped: Path) -> None:
    shutil.copy(stopped / "data.npz", place / "moved.npz")
    with resume(place, settings={"data": str(place / "moved.npz")}) as run:
        assert run.carry_out()
    (event,) = events(place / "run", "settings_changed")
    assert list(event["data"]["settings"]) == ["data"]


def test_another_schedule_is_noticed(place: Path, changed: Path) -> None:
    (changed / "plan.yaml").write_text(SCHEDULE.replace("epoch: 2", "epoch: 3"))
    with pytest.raises(UsageError, match=r"the controller of .* changed since it was saved"):
        resume(place)
    controller = f"schedule:{changed / 'plan.yaml'}"
    with resume(place, settings={"controller": controller}) as run:
        assert run.carry_out()


def test_another_controller_starts_afresh_and_is_recorded(place: Path) -> None:
    with resume(place, settings={"controller": "wait"}) as run:
        assert run.carry_out()
    assert listed(place).controller == "wait"
    (event,) = events(place / "run", "settings_changed")
    assert event["data"]["settings"]["controller"][1] == "wait"


def test_other_software_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(cls: type[RunInputs], contents: Any) -> RunInputs:
        return RunInputs(
            {name: value for name, value in contents.items() if value is not None},
            {"torch": "9.9.9"},
        )

    monkeypatch.setattr(RunInputs, "now", classmethod(other))
    with pytest.warns(EsperWarning, match=r"other software \(torch .* -> 9\.9\.9\)"):
        run = resume(place)
    with run:
        assert run.carry_out()
    (event,) = events(place / "run", "versions_changed")
    assert event["data"] == {"torch": [torch.__version__, "9.9.9"]}
    assert "other software: torch" in (place / "run" / "log.txt").read_text()


def test_a_loader_that_gives_other_samples_is_noticed(tmp_path: Path) -> None:
    def batches(seed: int) -> list[Any]:
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 8, 4, generator=rng)
        return [(one, torch.arange(8) % 3) for one in x]

    def call(val: list[Any], **more: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        settings = {"epochs": 2, "controller": "wait", "out": tmp_path / "run", **more}
        grow(model, ["0"], train=batches(0), val=val, **settings)

    call(batches(1))
    call(batches(1), resume=True)
    state = Checkpoints(tmp_path / "run", GROWING).load()
    assert state is not None
    with pytest.raises(UsageError, match=r"first validation batch of .* changed since"):
        call(batches(2), resume=True)
    again = Checkpoints(tmp_path / "run", GROWING).load()
    assert same(state, again)


def test_of_several_refused_changes_the_first_is_told_in_full() -> None:
    saved = {"slots": ["a"], "growth": {"seed": 0, "twin": False, "epochs": 3, "rewarm": 0}}
    now = {"slots": ["b"], "growth": {"seed": 1, "twin": True, "epochs": 4, "rewarm": 5}}
    batches: list[Any] = []
    request = GrowRequest(
        model=torch.nn.Linear(1, 1),
        train=batches,
        val=batches,
        config=GrowthConfig(),
        settings=now,
    )
    with pytest.raises(ConfigError) as told:
        request.changes_since(saved)
    line = str(told.value)
    assert " in this run and cannot become " in line
    assert "(and 3 more that may not change: " in line
    assert "growth.epochs" not in line
    assert len(line) < 300


def test_a_model_that_was_frozen_since_is_refused(tmp_path: Path) -> None:
    def call(*frozen: str, **more: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        )
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        batches = [(torch.randn(8, 4), torch.arange(8) % 3)]
        given = {"epochs": 12, "controller": "trial", "out": tmp_path / "run", **more}
        torch.manual_seed(1)
        grow(model, ["0"], train=batches, val=batches, **given)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        call("0", "1")
        words = r"number of trainable parameters of the model of .* \(was 72, is 0\); restore it"
        with pytest.raises(UsageError, match=words):
            call("0", "1", "2", resume=True)
        with pytest.raises(UsageError, match="choice of the model's parameters that train of"):
            call("0", "2", resume=True)
        call("0", "1", resume=True)
