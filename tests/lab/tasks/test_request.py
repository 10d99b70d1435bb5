from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from esper.growth.run import GrowthLoop
from esper.lab.tasks.request import (
    GrowSettings,
    build_model,
    growth_of,
    model_name,
    model_slots,
    read_settings,
)
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.nissa.folder import RunFolder
from esper.simic.training.recorded import read_run_config

NET = """
import torch
from torch import nn

NUMBER = 7


def make():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def with_slots():
    model = make()
    model.slot_paths = {"first": "0"}
    return model


def wrong():
    return "a string"


def needs(width):
    return make()


def broken():
    raise RuntimeError("out of\\n  ideas")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with a module of the user's, as the current one."""
    name = "net_of_a_user"
    (tmp_path / f"{name}.py").write_text(NET)
    (tmp_path / "half_written.py").write_text("def make(:\n")
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    (tmp_path / "fails.py").write_text("x = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    for loaded in (name, "half_written", "needs_more", "fails"):
        sys.modules.pop(loaded, None)


def test_a_factory_is_called_with_the_seed_of_the_run(module: str) -> None:
    first, again, other = (build_model(f"{module}:make", seed) for seed in (1, 1, 2))
    assert isinstance(first, nn.Sequential)
    assert torch.equal(first[0].weight, again[0].weight)  # type: ignore[index]
    assert not torch.equal(first[0].weight, other[0].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nocolon", "must look like MODULE:FACTORY or FILE.py:FACTORY, got 'nocolon'"),
        (":make", "must look like MODULE:FACTORY"),
        ("module:", "must look like MODULE:FACTORY"),
        ("surely_missing:make", "cannot import 'surely_missing'.*run from the folder that holds"),
        ("..up:make", "cannot import"),
        ("net_of_a_user:mak", "no callable 'mak', did you mean 'make'.*it has: make"),
        ("net_of_a_user:NUMBER", "no callable 'NUMBER'"),
        ("net_of_a_user:wrong", r"returned str, not a torch\.nn\.Module"),
        ("net_of_a_user:needs", r"needs failed: TypeError: .*it is called without arguments"),
        ("net_of_a_user:broken", r"broken failed: RuntimeError: out of ideas.*net_of_a_user\.py"),
        ("half_written:make", r"cannot import 'half_written': SyntaxError: .*half_written\.py"),
        ("needs_more:make", "cannot import 'needs_more': No module named 'surely_not_installed'"),
        ("gone.py:make", r"--model gone\.py:make: there is no such file"),
        ("net_of_a_user.py:mak", "no callable 'mak', did you mean 'make'"),
        ("fails:make", r"cannot import 'fails': ZeroDivisionError: .*fails\.py, line 1"),
    ],
)
def test_a_factory_that_gives_no_model_is_named(module: str, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_model(spec, 0)
    assert "\n" not in str(caught.value)


def test_a_factory_may_be_named_by_its_file(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for spec in (f"../{module}.py:make", f"{tmp_path / module}.py:make"):
        assert isinstance(build_model(spec, 1), nn.Sequential)
        assert model_name(spec) == f"{module}:make"
    assert model_name("nets.mine:make") == "nets.mine:make"


def test_slots_come_from_the_command_or_from_the_model(module: str) -> None:
    model = build_model(f"{module}:with_slots", 0)
    assert model_slots(model, ()) == {"first": "0"}
    assert model_slots(model, ("2",)) == ("2",)
    assert model_slots(model, ("auto",)) == "auto"
    assert model_slots(build_model(f"{module}:make", 0), ()) == "auto"


def test_settings_start_from_those_of_the_task() -> None:
    assert growth_of("digits").epochs == 60
    assert growth_of("digits").twin
    assert growth_of("digits").gardener.param_budget == 500_000
    assert growth_of(None).twin
    assert growth_of("fashion").training.batch_size == 128
    assert growth_of(None).training.batch_size == 64
    with pytest.raises(UsageError, match="unknown task 'digit', did you mean 'digits'"):
        growth_of("digit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either --task T or --model MODULE:FACTORY with --data PATH"),
        ({"task": "digits", "model": "a:b", "data": "x"}, "give either --task T or --model"),
        ({"model": "a:b"}, "--model needs --data PATH"),
    ],
)
def test_what_is_grown_must_be_said_once(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrowSettings(**settings)


def test_a_request_survives_yaml() -> None:
    settings = GrowSettings(
        task="digits",
        slots=("r0c0", "r0c2"),
        controller="schedule:plan.yaml",
        growth=growth_of("digits").replace(epochs=7, seed=3),
    )
    text = yaml.safe_dump(settings.to_mapping(), sort_keys=False)
    again = GrowSettings.from_mapping(yaml.safe_load(text))
    assert again == settings
    assert "device: cpu" in text
    with pytest.raises(ConfigError, match="GrowSettings has no key 'controler', did you mean"):
        GrowSettings.from_mapping({**settings.to_mapping(), "controler": "wait"})


def test_a_task_is_built_with_the_slots_that_were_chosen() -> None:
    settings = GrowSettings(
        task="digits",
        slots=("r0c2", "blocks.0"),
        controller="wait",
        growth=growth_of("digits"),
    )
    run = GrowthLoop(settings.request())
    assert run.garden.slot_paths == {"r0c2": "blocks.2", "blocks.0": "blocks.0"}
    assert run.name == "digits"
    with pytest.raises(UsageError, match=r"no slot 'r0c9'.*slots: r0c0, r0c1, r0c2"):
        settings.replace(slots=("r0c9",)).request()


def test_a_model_is_built_with_its_data(module: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    settings = GrowSettings(
        model=f"{module}:make",
        data=str(tmp_path / "data.npz"),
        slots=("0",),
        controller="wait",
        growth=growth_of(None).replace(epochs=1),
    )
    run = GrowthLoop(settings.request())
    (record,) = run.epochs()
    assert record.val_score > 0
    assert run.name == f"{module}:make"


def test_the_request_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    settings = GrowSettings(task="digits", growth=growth_of("digits"))
    folder = RunFolder(tmp_path / "run")
    with folder.claim_new(settings.to_mapping(), overwrite=False) as lock:
        lock.release()
    assert read_settings(folder) == settings
    folder.write_config({"ppo": {}, "rounds": 3})
    with pytest.raises(UsageError, match="is a training run; continue it with: esper train"):
        read_settings(folder)
    folder.write_config({"command": "prove", "seeds": 3})
    for read in (read_settings, read_run_config):
        with pytest.raises(
            UsageError, match="`esper prove`; continue it with: esper prove --resume"
        ):
            read(folder)


def test_a_run_folder_of_the_old_format_is_refused_in_one_line(tmp_path: Path) -> None:
    """It had the optimizer's settings elsewhere, and its checkpoint was one folder."""
    folder = RunFolder(tmp_path / "run")
    settings = GrowSettings(task="digits", growth=growth_of("digits")).to_mapping()
    settings["training"] = settings["growth"].pop("training")
    settings["growth"]["max_grad_norm"] = settings["training"].pop("max_grad_norm")
    with folder.claim_new(settings, overwrite=False) as lock:
        lock.release()
    with pytest.raises(CheckpointError, match=r"config\.yaml: GrowSettings has no key 'training'"):
        read_settings(folder)
    latest = folder.path / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    manifest = {"format": "esper-state", "layout": 1, "kind": "growing run", "esper": "0.1.0"}
    (latest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"saved by an older Esper"):
        read_settings(folder)


def test_a_device_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GrowSettings(task="digits", device="cuda", growth=growth_of("digits"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device"):
        settings.request()
