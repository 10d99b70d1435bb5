from __future__ import annotations

import threading
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RoundRow
from tests.nissa.telling import run_row, tell
from tests.scripts.cli.terminal import esper


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give lines room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


def test_a_finished_run_is_told_from_first_to_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "done", sinks=())
    said = esper(capsys, "watch", tmp_path / "done")
    assert said.code == 0
    assert "epoch 1/30" in said.out
    assert "epoch 30/30" in said.out
    assert "epoch 4: ADVANCE r0c0" in said.out
    assert "finished, 30 of 30 epochs; validation score 90.00" in said.out


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path / "stopped", stop_after=7, sinks=())
    said = esper(capsys, "watch", tmp_path / "stopped")
    assert "interrupted, 7 of 30 epochs" in said.out
    assert f"esper grow --resume --out {tmp_path / 'stopped'}" in said.out


def test_a_run_under_way_is_followed_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path / "going", run_row(epochs=2), sinks=())
    store.write(EpochRow(step=1, val_score=60.0, val_loss=1.0, parameters=10, flops=20))
    store.flush()

    def go_on() -> None:
        store.write(EpochRow(step=2, val_score=71.0, val_loss=0.9, parameters=10, flops=20))
        store.finish("finished", val_score=71.0)
        store.close()

    threading.Timer(0.3, go_on).start()
    said = esper(capsys, "watch", tmp_path / "going", "--every", "0.05")
    assert said.out.count("epoch 1/2") == 1
    assert "epoch 2/2" in said.out
    assert "finished, 2 of 2 epochs; validation score 71.00" in said.out


def test_the_rounds_of_a_training_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "trained", run_row(kind="train", rounds=2), sinks=()) as store:
        for number in (0, 1):
            store.write(RoundRow(round=number, return_mean=number - 0.5, gain_mean=1.25))
        store.finish("finished")
    said = esper(capsys, "watch", tmp_path / "trained")
    assert "round 1  return -0.500  validation gain +1.25 points" in said.out
    assert "round 2  return +0.500" in said.out
    assert "finished, 2 of 2 rounds" in said.out


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [(("nowhere",), "give the folder of a run"), (("x", "--every", "0"), "more than 0 seconds")],
)
def test_what_cannot_be_watched_is_refused(
    arguments: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advice in esper(capsys, "watch", *arguments).complaint()
