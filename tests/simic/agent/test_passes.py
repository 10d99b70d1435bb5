"""How an update runs when something happens in the middle of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esper.tamiyo.networks.decision import Scores
from tests.simic.agent.rollouts import collect, make_agent


@pytest.mark.parametrize(("minibatches", "forwards"), [(1, 3 + 1), (2, 2 + 3 * 2 + 2)])
def test_nothing_is_scored_twice(
    minibatches: int, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference and the first pass are one without minibatches; measuring costs one pass."""
    agent = make_agent(epochs=3, target_kl=0.0, minibatches=minibatches)
    buffer = collect(agent.policy, rows=6)
    calls: list[int] = []
    score = agent.network.score

    def counted(states: Tensor, *rest: Any, **options: Any) -> Scores:
        calls.append(len(states))
        return score(states, *rest, **options)

    monkeypatch.setattr(agent.network, "score", counted)
    agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    # One more looks at some rows without their action feedback.
    assert len(calls) == forwards + 1


def test_a_stop_before_the_first_step_of_a_pass_costs_no_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(epochs=9, target_kl=1e-9, learning_rate=0.01)
    buffer = collect(agent.policy)
    calls = 0
    score = agent.network.score

    def counted(*arguments: Any, **options: Any) -> Scores:
        nonlocal calls
        calls += 1
        return score(*arguments, **options)

    monkeypatch.setattr(agent.network, "score", counted)
    report = agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    assert len(report.updates) == 1
    assert report.steps == 1
    assert report.updates[0]["stopped_early"]
    assert report.approx_kl > 0
    assert calls == 2 + 1


def test_weights_that_break_in_mid_update_end_it_and_are_reported() -> None:
    agent = make_agent(epochs=4, target_kl=0.0)
    buffer = collect(agent.policy)
    steps = 0

    def poison(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            with torch.no_grad():
                agent.network.op_head[-1].bias[0] = torch.nan

    agent.optimizer.register_step_post_hook(poison)
    report = agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    assert (report.steps, steps) == (2, 2)
    assert [found.heads for found in report.nonfinite] == [("op",)]
    assert [row["ordinal"] for row in report.updates] == [0, 1]
    assert report.updates[0]["approx_kl"] is not None
    assert report.updates[1]["approx_kl"] is None
    assert report.updates[1]["was_skipped"]
    assert agent.updates_done == 1
    assert agent.skips_in_a_row == 1
    assert report.steps


def test_more_minibatches_than_rows_are_rows() -> None:
    agent = make_agent(minibatches=50, epochs=1)
    report = agent.update(collect(agent.policy, rows=3), progress=0.0, paid_off=0.0, round=0)
    assert report.steps == 3


def test_a_round_without_any_choice_still_teaches_the_critic() -> None:
    agent = make_agent()
    buffer = collect(agent.policy)
    buffer.batch().free.zero_()
    before = agent.network.value_head[0].weight.detach().clone()
    report = agent.update(buffer, progress=0.0, paid_off=0.0, round=0)
    assert report.steps == 4
    assert report.updates[-1]["usable_steps"] == 0
    assert report.updates[-1]["approx_kl"] is None
    assert {row["ratio_max"] for row in report.heads} == {None}
    assert not torch.equal(before, agent.network.value_head[0].weight)
