"""`esper.train`: what the command does, in one call."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.leyline.errors import UsageError
from esper.nissa.reader import open_run
from esper.simic.training.progress import Progress
from esper.simic.training.train import train
from tests.simic.training.tiny import stored_rows

TINY: dict[str, Any] = {
    "rounds": 2,
    "device": "cpu",
    "tasks": ["digits_mlp"],
    "rows": 2,
    "episode_length": 4,
    "strategy": "sequential",
    "policy": {"lstm_hidden_dim": 16},
}


def story(folder: Path) -> dict[str, Any]:
    found = stored_rows(folder)
    found.pop("runs")
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> esper.Trained:
    return train("smoke", out=tmp_path_factory.mktemp("runs") / "whole", **TINY)


def test_a_controller_is_trained_in_one_call(whole: esper.Trained) -> None:
    assert esper.train is train
    assert whole.rounds == 2
    assert whole.policy == whole.folder / "checkpoints" / "best"
    assert whole.report.is_file()
    assert whole.last_round["round"] == 1
    assert isinstance(whole.last_round["return_mean"], float)
    assert whole.summary["task"] == "digits_mlp"
    assert {entry.name for entry in whole.folder.iterdir()} >= {"tb", "run.db", "summary.json"}
    told = esper.read_manifest(whole.policy)
    assert (told.kind, told.meta["recipe"]) == ("policy", "smoke")
    with open_run(whole.folder) as stored:
        assert (stored.info.status, stored.info.command) == ("finished", "esper.train(...)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_the_same_call_goes_on(
    whole: esper.Trained, tmp_path: Path, number: signal.Signals
) -> None:
    def interrupt(progress: Progress) -> None:
        if (progress.phase, progress.round, progress.step) == ("rollout", 1, 2):
            signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt, match="is saved; continue it with resume=True"):
            # There is no run yet: it is started.
            train("smoke", out=tmp_path / "run", resume=True, on_progress=interrupt, **TINY)
    finally:
        signal.signal(signal.SIGTERM, before)
    with open_run(tmp_path / "run") as stored:
        assert stored.info.status == "interrupted"
    again = train("smoke", out=tmp_path / "run", resume=True, **TINY)
    assert story(again.folder) == story(whole.folder)


def test_a_run_is_prolonged_by_name(tmp_path: Path) -> None:
    train("smoke", out=tmp_path / "run", **{**TINY, "rounds": 1})
    assert train(out=tmp_path / "run", resume=True).rounds == 1
    longer = train(out=tmp_path / "run", resume=True, rounds=2, ppo={"clip": 0.1})
    assert longer.rounds == 2
    with open_run(tmp_path / "run") as stored:
        (event,) = stored.rows("events", where="kind = 'settings_changed'")
    assert "ppo.clip 0.5 -> 0.1" in event["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "not empty; continue it with resume=True, replace it with overwrite=True, or give"),
        ({"resume": True, "overwrite": True}, "give one of them"),
        ({"resume": True, "recipe": "digits"}, "started from the recipe 'smoke', not 'digits'"),
        ({"resume": True, "rows": 3}, "rows is 2 in this run and cannot become 3"),
        ({"resume": True, "ppo": {"clp": 1}}, "did you mean 'clip'"),
        ({"recipe": "smok", "out": "elsewhere"}, "did you mean 'smoke'"),
        ({"out": "elsewhere", "round": 3}, "no key 'round', did you mean 'rounds'"),
    ],
)
def test_a_wrong_call_is_one_line(
    whole: esper.Trained, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    given = dict(options)
    out = tmp_path / given.pop("out") if "out" in given else whole.folder
    with pytest.raises(UsageError, match=words) as caught:
        train(given.pop("recipe", None), out=out, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()
