from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.simic.training.episodes import LEAST_OTHERS, TwinRegression

EPOCHS = 20


def twins(count: int, seed: int = 0, kept: float = 0.9) -> Tensor:
    """Return scores [count, epochs]: a curve that all share, and luck that lasts for a while."""
    draws = torch.Generator().manual_seed(seed)
    luck, found = torch.randn(count, generator=draws), []
    for epoch in range(EPOCHS):
        found.append(60.0 + epoch + luck)
        luck = kept * luck + (1 - kept**2) ** 0.5 * torch.randn(count, generator=draws)
    return torch.stack(found, dim=1)


def fit(curves: Tensor, own_share: float = 0.4) -> TwinRegression:
    return TwinRegression.fit(own_share, {"task": curves}, ["task"] * len(curves))


def test_the_gain_starts_from_zero_where_a_row_acts() -> None:
    curves = twins(30)
    for epoch in (1, 7, EPOCHS):
        expected = fit(curves).expect(curves, torch.full((30,), epoch))
        torch.testing.assert_close(expected[:, epoch - 1], curves[:, epoch - 1])


def test_the_own_twin_alone_is_a_choice() -> None:
    curves = twins(30)
    expected = fit(curves, own_share=1.0).expect(curves, torch.full((30,), 3))
    torch.testing.assert_close(expected, curves)


@pytest.mark.parametrize("count", [1, 2, 5, LEAST_OTHERS])
def test_until_enough_others_are_known_the_own_twin_is_the_measure(count: int) -> None:
    """To the bit: a row that equals its twin has a gain of exactly 0."""
    curves = twins(count)
    assert torch.equal(fit(curves).expect(curves, torch.full((count,), 3)), curves)


def test_enough_others_are_twins_beside_the_own_one() -> None:
    curves = twins(LEAST_OTHERS + 1)
    expected = fit(curves).expect(curves, torch.full((LEAST_OTHERS + 1,), 3))
    assert float((expected - curves).abs().max()) > 0.1


def test_a_task_with_few_twins_is_not_helped_by_those_of_another() -> None:
    many, few = twins(30), twins(3, seed=1)
    both = TwinRegression.fit(0.4, {"a": many, "b": few}, ["a"] * 30 + ["b"] * 3)
    expected = both.expect(torch.cat([many, few]), torch.full((33,), 5))
    assert torch.equal(expected[30:], few)
    assert not torch.equal(expected[:30], many)


def test_gains_are_less_noisy_and_their_mean_is_the_same() -> None:
    """A grown row shares the task's curve with its twin and, after a while, hardly its luck."""
    curves = twins(400)
    grown = 2.0 + twins(400, seed=1)
    own = (grown - curves)[:, -1]
    regressed = (grown - fit(curves).expect(curves, torch.full((400,), 1)))[:, -1]
    assert float(regressed.mean()) == pytest.approx(float(own.mean()), abs=1e-3)
    assert float(regressed.var()) < 0.7 * float(own.var())


@pytest.mark.parametrize("epoch", [2, 10, 18])
def test_luck_is_not_paid_for(epoch: int) -> None:
    """Acting where one is lucky, and changing nothing by it, gains nothing on average."""
    curves = twins(4000)
    lucky = curves[:, epoch - 1] > curves[:, epoch - 1].mean() + 0.5
    gain = (curves - fit(curves).expect(curves, torch.full((4000,), epoch)))[lucky, -1]
    naive = 0.6 * (curves - curves.mean(0))[lucky, -1]
    assert abs(float(gain.mean())) < 0.05
    assert float(naive.mean()) > 0.1


def test_every_task_has_its_own_mean() -> None:
    one, other = twins(20), twins(20, seed=1) - 30.0
    both = TwinRegression.fit(0.4, {"a": one, "b": other}, ["a"] * 20 + ["b"] * 20)
    expected = both.expect(torch.cat([one, other]), torch.full((40,), 5))
    torch.testing.assert_close(expected[:20], fit(one).expect(one, torch.full((20,), 5)))
    torch.testing.assert_close(expected[20:], fit(other).expect(other, torch.full((20,), 5)))
