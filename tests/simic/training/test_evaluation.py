from __future__ import annotations

import pytest
import torch

from esper.simic.training.evaluation import Evaluator, paired_interval
from esper.tamiyo.controllers import new_policy
from tests.simic.training.tiny import tiny_config

CONFIG = tiny_config(episode_length=6)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(CONFIG, 3)


def test_waiting_gains_exactly_nothing(evaluator: Evaluator) -> None:
    found = evaluator.evaluate("wait")
    assert found.test_gains.tolist() == [0.0] * 3
    assert found.val_gains.tolist() == [0.0] * 3
    assert found.returns.tolist() == found.twin_returns.tolist() == [0.0] * 3
    assert found.early_fossilization is None
    assert found.op_counts["WAIT"] == 18


def test_a_controller_is_compared_with_its_own_twins(evaluator: Evaluator) -> None:
    found = evaluator.evaluate("random")
    waiting = evaluator.evaluate("wait")
    assert torch.equal(found.twin_test_scores, waiting.test_scores)
    assert torch.equal(found.twin_val_scores, waiting.val_scores)
    assert int(found.germinated.sum()) > 0
    assert (found.parameter_ratios >= 1.0).all()
    assert (found.flop_ratios >= 1.0).all()
    assert found.test_scores.isfinite().all()
    interval = paired_interval(found.test_gains)
    assert interval.low <= interval.mean <= interval.high


def test_a_greedy_policy_plays_the_same_twice() -> None:
    policy = new_policy(CONFIG.policy, seed=2)
    one, other = (Evaluator(CONFIG, 2, touch_test=False).evaluate(policy) for _ in range(2))
    assert torch.equal(one.returns, other.returns)
    assert one.test_scores.isnan().all()


def test_other_seeds_are_other_networks(evaluator: Evaluator) -> None:
    other = Evaluator(CONFIG, 3, first_seed=3, touch_test=False).evaluate("wait")
    assert not set(other.seeds) & set(evaluator.evaluate("wait").seeds)
