from __future__ import annotations

import math

import pytest
import torch

from esper.leyline.actions import NUM_OPS, LifecycleOp
from esper.nissa.monitors.policy import HEAD_RATIO
from esper.nissa.monitors.policy import RATIO_UNCHANGED as MONITORED_UNCHANGED
from esper.simic.agent.report import (
    RATIO_CRITICAL,
    RATIO_UNCHANGED,
    RATIO_WARNING,
    monitor_advantage_bias_by_op,
    monitor_critic_op_sensitivity,
    monitor_per_head_ratios,
)


def test_advantages_by_op() -> None:
    torch.manual_seed(0)
    ops = torch.tensor([LifecycleOp.WAIT] * 500 + [LifecycleOp.PRUNE] * 200)
    advantages = torch.randn(700)
    advantages[500:] = 3.0 + 0.1 * advantages[500:]
    found = monitor_advantage_bias_by_op(advantages, ops)
    assert set(found) == {"WAIT", "PRUNE"}
    assert (found["WAIT"]["n"], found["WAIT"]["is_biased"]) == (500, False)
    assert found["PRUNE"]["is_biased"]
    assert found["PRUNE"]["mean"] == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize(
    ("mean", "count", "biased"),
    [(1.1, 101, True), (-1.1, 101, True), (1.1, 100, False), (0.9, 101, False)],
)
def test_an_op_is_biased_beyond_its_deviation_and_a_hundred_decisions(
    mean: float, count: int, biased: bool
) -> None:
    values = torch.ones(count)
    values[::2] = -1.0
    values = (values - values.mean()) / values.std() + mean
    found = monitor_advantage_bias_by_op(values, torch.zeros(count, dtype=torch.int64))
    assert found["WAIT"]["is_biased"] is biased


def test_the_levels_of_ratios_are_those_of_the_monitor() -> None:
    assert (HEAD_RATIO.warning, HEAD_RATIO.critical) == (RATIO_WARNING, RATIO_CRITICAL)
    assert MONITORED_UNCHANGED == RATIO_UNCHANGED


def test_the_shape_of_advantages() -> None:
    ops = torch.zeros(10, dtype=torch.int64)
    advantages = torch.tensor([-1.0] * 9 + [9.0])
    shape = monitor_advantage_bias_by_op(advantages, ops)["WAIT"]
    # A Bernoulli with p = 0.1: skewness (1 - 2p) / sqrt(pq), excess kurtosis (1 - 6pq) / pq.
    assert shape["skew"] == pytest.approx(0.8 / 0.3)
    assert shape["kurtosis"] == pytest.approx((1 - 0.54) / 0.09)
    assert shape["positive"] == pytest.approx(0.1)


def test_forced_decisions_do_not_count() -> None:
    ops = torch.tensor([0] * 200)
    advantages = torch.cat((torch.full((150,), 9.0), torch.zeros(50)))
    free = torch.cat((torch.zeros(150), torch.ones(50))).bool()
    found = monitor_advantage_bias_by_op(advantages, ops, free)
    assert found["WAIT"] == {
        "mean": 0.0,
        "std": 0.0,
        "n": 50,
        "skew": 0.0,
        "kurtosis": 0.0,
        "positive": 0.0,
        "is_biased": False,
    }
    assert monitor_advantage_bias_by_op(advantages, ops, torch.zeros(200).bool()) == {}
    assert monitor_advantage_bias_by_op(advantages[:1], ops[:1])["WAIT"]["std"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "level"),
    [(1.0, "unchanged"), (1.5, "ok"), (3.5, "warning"), (11.0, "critical"), (0.5, "ok")],
)
def test_ratios_by_head(ratio: float, level: str) -> None:
    old = {"op": torch.zeros(10), "slot": torch.zeros(10)}
    new = {"op": torch.full((10,), math.log(ratio)), "slot": torch.zeros(10)}
    found = monitor_per_head_ratios(old, new)
    assert found["op"]["level"] == level
    assert found["op"]["max"] == pytest.approx(ratio)
    assert found["slot"]["level"] == "unchanged"


def test_only_used_steps_count_and_unused_heads_are_left_out() -> None:
    old = {"op": torch.zeros(4), "slot": torch.zeros(4)}
    new = {"op": torch.tensor([5.0, 0.0, 0.0, 0.0]), "slot": torch.ones(4)}
    used = {"op": torch.tensor([False, True, True, True]), "slot": torch.zeros(4).bool()}
    found = monitor_per_head_ratios(old, new, used)
    assert set(found) == {"op"}
    assert found["op"]["max"] == 1.0


def test_an_infinite_ratio_is_bounded() -> None:
    found = monitor_per_head_ratios({"op": torch.tensor([-900.0])}, {"op": torch.tensor([0.0])})
    assert found["op"]["max"] == pytest.approx(math.exp(20))
    assert found["op"]["level"] == "critical"


def test_a_critic_that_ignores_the_op() -> None:
    same = torch.randn(50, 1).expand(50, NUM_OPS)
    found = monitor_critic_op_sensitivity(same)
    assert found["q_variance_across_ops"] == 0.0
    assert found["q_op_spread"] == pytest.approx(0.0, abs=1e-6)
    assert len(found["q_per_op_mean"]) == NUM_OPS
    apart = torch.arange(float(NUM_OPS)).expand(50, NUM_OPS).requires_grad_()
    found = monitor_critic_op_sensitivity(apart)
    assert found["q_variance_across_ops"] == pytest.approx(3.5)
    assert found["q_op_spread"] == 5.0
    assert found["q_per_op_mean"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
