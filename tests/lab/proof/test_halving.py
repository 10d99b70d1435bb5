"""Successive halving over static depths."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

from esper.lab.proof.halving import (
    DEPTHS,
    combine,
    decision_epochs,
    halve,
    halving_arms,
)
from esper.lab.tasks.member import GivenMember
from esper.leyline.errors import UsageError
from tests.lab.population.tiny_tasks import TinyText
from tests.lab.proof.made_up import result
from tests.lab.proof.small import member


@pytest.mark.parametrize("epochs", [8, 9, 12, 15, 40, 60, 61])
def test_all_networks_together_take_one_budget(epochs: int) -> None:
    first, second = decision_epochs(epochs)
    assert 1 <= first < second < epochs
    together = 3 * first + 2 * (second - first) + (epochs - second)
    spent = Fraction(2, 3) * Fraction(together, epochs)
    assert 1 - Fraction(1, 2 * epochs) < spent <= 1
    assert spent == 1 or epochs % 2


def test_decisions_come_after_a_sixth_and_a_third_of_a_run() -> None:
    assert decision_epochs(30) == (5, 10)
    assert decision_epochs(60) == (10, 20)


def test_the_worst_is_stopped_twice() -> None:
    # Eight epochs: decisions after one and three. Only what is seen by then counts.
    curves = [
        [3.0, 3.0, 3.0, *[0.0] * 5],
        [1.0, 9.0, 9.0, *[9.0] * 5],
        [2.0, 4.0, 4.0, *[0.0] * 5],
    ]
    assert halve(curves) == (2, [3, 1, 8])


def test_the_best_score_so_far_counts_and_of_equals_the_first() -> None:
    curves = [[5.0, 1.0, 1.0], [math.nan, 9.0, 9.0], [4.0, 5.0, 4.9]]
    curves = [[*curve, *[0.0] * 5] for curve in curves]
    assert halve(curves) == (0, [8, 1, 3])


def test_every_seed_has_the_result_of_its_own_best_network() -> None:
    runs = []
    for number in range(3):
        own = result("any", "m", errors=[0.1 * (number + 1), 0.2 * (number + 1)], purpose="halving")
        curves = [[float(-number)] * 8, [float(number)] * 8]
        grown_at = [[number], [10 + number]]
        runs.append(
            dataclasses.replace(
                own,
                curves=curves,
                germinated_at=grown_at,
                scored_epochs=[8, 8],
                training_flops=[24.0, 48.0],
            )
        )
    found = combine(runs, "halving")
    assert found.key == ("proof", "halving", "m")
    assert found.test_errors == pytest.approx([0.1, 0.6])
    assert found.curves == [[0.0] * 8, [2.0] * 8]
    assert found.germinated_at == [[0], [12]]
    # Epochs: 8 of the best, 3 of the second, 1 of the other.
    assert found.training_flops == pytest.approx([24 * 12 / 8, 48 * 12 / 8])
    assert (found.seeds, found.host_flops) == (runs[0].seeds, runs[0].host_flops)


def test_every_depth_has_two_thirds_of_the_budget() -> None:
    for budget in ("90x", 9e9):
        own = GivenMember("text", TinyText(TinyText.defaults.replace(budget=budget)))
        whole = own.task().compute_budget(9)
        for arm, depth in zip(halving_arms([own]), DEPTHS, strict=True):
            task = arm.task(own)
            assert task.compute_budget(9) == pytest.approx(whole * 2 / 3, rel=1e-6)
            assert (task.host_flops > own.task().host_flops) == (depth > 1)
            assert task.config.learning_rate == own.task().config.learning_rate


def test_what_cannot_be_halved_is_refused() -> None:
    with pytest.raises(UsageError, match="'width 2, all images' has none"):
        halving_arms([member(2)])
    own = GivenMember("text", TinyText(TinyText.defaults.replace(budget="9x")))
    with pytest.raises(UsageError, match="needs runs of 8 epochs or more, and 'text' has 7"):
        halving_arms([own], horizon=7)
