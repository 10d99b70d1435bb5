from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from esper.growth.grow import EpochProgress, grow
from esper.growth.grown import Grown
from esper.leyline.records import DecisionRecord, EpochRecord
from tests.plots import SLOTS, make_batches, make_net


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def record(epoch: int, op: str = "WAIT") -> EpochRecord:
    decision = DecisionRecord(
        op=op,
        slot=None if op == "WAIT" else "r0c0",
        blueprint="conv_light" if op == "GERMINATE" else None,
        style=None,
        tempo=None,
        alpha_target=None,
        alpha_speed=None,
        alpha_curve=None,
        outcome="done",
        reason="",
    )
    return EpochRecord(
        epoch=epoch,
        train_loss=None,
        val_loss=0.5,
        val_score=80.0 + epoch,
        twin_score=None,
        stabilized=False,
        plateau_epochs=0,
        parameters=304,
        flops=5_840,
        slots=(),
        decision=decision,
        seconds=0.1,
    )


def test_a_log_gets_a_line_for_every_epoch_and_every_act() -> None:
    stream = io.StringIO()
    progress = EpochProgress(3, stream)
    for each in (record(1), record(2, "GERMINATE"), record(3)):
        progress.show(each)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 2: GERMINATE r0c0 conv_light",
        "epoch 3/3",
    ]
    assert "val score 81.00" in lines[0]


def test_a_terminal_gets_one_line_drawn_anew_in_its_own_alphabet() -> None:
    stream = Terminal()
    progress = EpochProgress(2, stream)
    progress.show(record(1, "PRUNE"))
    progress.show(record(2))
    said = stream.getvalue()
    assert said.count("\n") == 2
    assert said.count("\r") == 2
    assert "epoch 1: PRUNE r0c0\n" in said
    assert said.endswith("304 parameters\n")
    assert said.isascii()


@pytest.fixture
def run() -> Callable[[bool | None], Grown]:
    def grow_two_epochs(progress: bool | None) -> Grown:
        batches = make_batches()
        return grow(
            *(make_net(), SLOTS),
            train=batches,
            val=batches,
            epochs=2,
            controller="wait",
            progress=progress,
        )

    return grow_two_epochs


@pytest.mark.parametrize(("asked", "lines"), [(True, 2), (False, 0), (None, 0)])
def test_grow_shows_epochs_where_it_is_asked_to(
    asked: bool | None,
    lines: int,
    run: Callable[[bool | None], Grown],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(asked)
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_grow_shows_epochs_to_whoever_watches(
    run: Callable[[bool | None], Grown], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run(None)
    assert "epoch 2/2" in terminal.getvalue()
