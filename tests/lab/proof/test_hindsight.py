from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest

from esper.lab.proof.choose import Ratios, measure_headroom
from esper.lab.proof.hindsight import (
    LEAST,
    cross_fit,
    halves,
    measure_hindsight,
    measure_useless,
)
from esper.leyline.errors import UsageError


def constant(*by_member: list[float]) -> np.ndarray:
    """Return [members, arms, 4 seeds] without noise; waiting's zeros come first."""
    table = np.array([[0.0, *own] for own in by_member])
    return np.repeat(table[..., None], 4, axis=-1)


def test_halves_are_every_other_seed() -> None:
    first, second = halves([[1, 10, 3, 20, 8]])
    assert (first.tolist(), second.tolist()) == ([4.0], [15.0])
    with pytest.raises(UsageError, match="at least 2 seeds"):
        halves([[1.0]])


def test_what_is_lucky_on_one_half_is_judged_by_the_other() -> None:
    lucky, steady = [1.0, -1.0, 1.0, -1.0], [0.2, 0.2, 0.2, 0.2]
    values = np.array([[[0.0] * 4, lucky, steady], [[0.0] * 4, lucky, [-0.4] * 4]])
    own, single = cross_fit(values)
    # The first half always chooses the lucky arm, which has -1 on the second. The second half
    # chooses the steady arm on the first member, and waiting on the other and for both together.
    assert own.tolist() == pytest.approx([(-1 + 0.2) / 2, (-1 + 0.0) / 2])
    assert single.tolist() == pytest.approx([-0.5, -0.5])


def test_an_arm_between_the_best_single_and_the_best_of_each() -> None:
    values = constant([0.2], [-0.2], [0.2], [-0.3])
    subject = np.repeat([[0.15], [0.0], [0.15], [0.0]], 4, axis=1)
    found = measure_hindsight(subject, values)
    assert (found.members, found.arms, found.single) == (4, 2, 0.0)
    assert found.gain.estimate == pytest.approx(0.1)
    assert found.reached.estimate == pytest.approx(0.075)
    assert found.share == pytest.approx(0.75)
    assert found.over_half.estimate == pytest.approx(0.025)
    assert found.over_best.estimate == pytest.approx(-0.025)
    assert found.over_best.high == 0.0
    perfect = measure_hindsight(values.max(1), values)
    assert perfect.share == pytest.approx(1.0)
    assert (perfect.over_best.low, perfect.over_best.high) == (0.0, 0.0)
    single = measure_hindsight(np.zeros((4, 4)), values)
    assert (single.share, single.reached.estimate) == (0.0, 0.0)


def test_intervals_choose_the_best_single_arm_again() -> None:
    by_member = [0.3, -0.2, 0.25, -0.3, 0.1, -0.05, 0.2, -0.25]
    values, stream = constant(*([each] for each in by_member)), random.Random(4)
    found = measure_hindsight(np.zeros((8, 4)), values)
    drawn = []
    for _ in range(4000):
        chosen = [stream.choice(by_member) for _ in by_member]
        drawn.append(fmean(max(0.0, each) for each in chosen) - max(0.0, fmean(chosen)))
    drawn.sort()
    assert (found.gain.low, found.gain.high) == pytest.approx((drawn[100], drawn[3900]), abs=0.01)
    reached = sorted(-max(0.0, fmean(stream.choices(by_member, k=8))) for _ in range(4000))
    assert found.reached.low == pytest.approx(reached[100], abs=0.015)
    assert found.reached.high == 0.0


def test_the_best_of_noise_gains_nothing() -> None:
    stream = np.random.default_rng(1)
    values = stream.normal(0, 0.1, (60, 12, 4))
    values[:, 0] = 0.0
    found = measure_hindsight(stream.normal(0, 0.1, (60, 4)), values)
    assert found.gain.low < 0 < found.gain.high
    assert abs(found.gain.estimate) < 0.03
    # Chosen and judged by the same seeds it would have looked like a gain.
    assert values.mean(2).max(1).mean() > 0.07


def test_nothing_to_gain_has_no_share() -> None:
    found = measure_hindsight(constant([0.1], [0.1])[:, 1], constant([0.2], [0.2]))
    assert (found.gain.estimate, found.share) == (0.0, None)
    assert found.reached.estimate == pytest.approx(-0.1)


def test_a_search_measures_the_same_headroom() -> None:
    values = np.random.default_rng(2).normal(0, 0.1, (5, 4, 6))
    values[:, 0] = 0.0
    table = {
        str(member): {
            str(arm): Ratios(list(range(6)), [], values[member, arm].tolist(), [1.0], [1.0])
            for arm in (1, 2, 3)
        }
        for member in range(5)
    }
    found = measure_headroom(table, ["1", "2", "3"], "test")
    same = measure_hindsight(np.zeros((5, 6)), values)
    assert found["hindsight"] == pytest.approx(same.gain.estimate)
    assert found["single"] == pytest.approx(same.single)


def test_useless_members_are_found_on_one_half_and_judged_on_the_other() -> None:
    """By member: useless always; deeper pays; useless on the first half alone; nothing deeper."""
    others = np.array(
        [
            [[-0.1] * 4, [-0.2] * 4],
            [[-0.1] * 4, [0.3] * 4],
            [[-0.1, 0.1, -0.1, 0.1], [-0.2] * 4],
            [[-0.1] * 4, [-0.1] * 4],
        ]
    )
    is_deeper = np.array([[True, True], [True, True], [True, True], [False, False]])
    subject = np.array([[0.01, 0.03, 0.01, 0.03], [9.0] * 4, [9.0, -0.06, 9.0, -0.06], [9.0] * 4])
    found = measure_useless(subject, others, is_deeper)
    assert (found.members, found.by_both) == (2, 1)
    assert found.mean == pytest.approx((0.02 - 0.06) / 2)
    assert found.over_waiting is not None
    assert (found.over_waiting.low, found.over_waiting.high) == pytest.approx((-0.06, 0.02))
    # What is no deeper there cannot say that growing helps, by luck or not.
    lucky = others.copy()
    lucky[0, 1] = 0.5
    masked = is_deeper.copy()
    masked[0, 1] = False
    assert measure_useless(subject, lucky, is_deeper).members == 1
    assert measure_useless(subject, lucky, masked) == found


def test_where_growing_always_helps_nothing_is_useless() -> None:
    found = measure_useless(np.ones((2, 4)), np.ones((2, 1, 4)), np.ones((2, 1), dtype=bool))
    assert (found.members, found.mean, found.over_waiting) == (0, None, None)
    one = measure_useless(
        np.ones((2, 4)), np.array([[[-1.0] * 4], [[1.0] * 4]]), np.ones((2, 1), dtype=bool)
    )
    assert (one.members, one.mean, one.over_waiting) == (1, 1.0, None)


def test_half_a_percent_more_loss_is_the_limit() -> None:
    assert np.exp(-LEAST) == pytest.approx(1.005)
