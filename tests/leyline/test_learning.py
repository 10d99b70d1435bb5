"""What is said early in a run in which a network learns nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from esper.leyline.learning import why_not_learning
from esper.leyline.records import EpochRecord
from tests.leyline.test_reasons import epoch

CHANCE = math.log(10)


def run(losses: list[float], score: float = 10.0) -> list[EpochRecord]:
    return [replace(epoch(n), val_loss=loss, val_score=score) for n, loss in enumerate(losses, 1)]


def test_a_network_at_chance_is_named_after_five_epochs_or_a_tenth() -> None:
    history = run([2.303, 2.304, 2.302, 2.303, 2.305, 2.303])
    assert why_not_learning(history[:4], CHANCE, 60) == ""
    assert why_not_learning(history[:5], CHANCE, 50) == (
        "The network has learned nothing in 5 epochs: its best validation loss is 2.302, and "
        "guessing gives 2.303; check the data, the loss and the learning rate."
    )
    assert why_not_learning(history[:5], CHANCE, 60) == ""
    assert "in 6 epochs" in why_not_learning(history, CHANCE, 60)
    # So short a run is never reported.
    assert why_not_learning(history, CHANCE, 9) == ""


@pytest.mark.parametrize(
    "history",
    [
        run([2.303, 2.0, 2.1, 2.0, 2.0]),
        run([2.9, 2.8, 2.7, 2.6, 2.5]),
        run([2.311, 2.315, 2.307, 2.302, 2.288]),
        run([2.5, 2.4, 2.6, 2.5, 2.5], score=50.0) + run([2.5], score=40.0),
        run([2.303, math.nan, 2.303, 2.303, 2.303]),
    ],
    ids=["lower", "falling", "falling after the second", "right answers", "not finite"],
)
def test_a_network_that_learns_slowly_is_not_named(history: list[EpochRecord]) -> None:
    history = [*history[:4], replace(history[-1], epoch=5)]
    assert why_not_learning(history, CHANCE, 20) == ""


def test_where_the_loss_of_guessing_is_unknown_only_a_loss_that_stands_still_counts() -> None:
    told = why_not_learning(run([4.0, 4.001, 4.0, 4.0, 4.0], score=-4.0), None, 20)
    assert "its validation loss stands still at 4;" in told
    assert why_not_learning(run([4.0, 4.1, 4.2, 4.1, 4.3], score=-4.0), None, 20) == ""
