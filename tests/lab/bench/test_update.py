from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from esper.lab.bench import update as recurrent_ppo
from esper.lab.bench.update import UpdateWork, compare_updates, find_update_reference
from esper.lab.imagined import random_lives
from esper.leyline.errors import UsageError
from esper.simic.agent.ppo import PPOAgent


def small_work(minibatches: int = 2) -> UpdateWork:
    return UpdateWork(random_lives(4, 6), 16, epochs=2, minibatches=minibatches)


def weights_of(agent: PPOAgent) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in agent.network.parameters()])


def test_an_update_really_learns() -> None:
    work = small_work()
    before = work.agent.network.op_head[-1].weight.detach().clone()
    work.update()
    assert work.agent.updates_done == 1
    assert not torch.equal(before, work.agent.network.op_head[-1].weight)
    assert work.buffer.batch().valid.all()


def test_minibatches_are_whole_rows() -> None:
    with pytest.raises(UsageError, match="5 minibatches need as many rows, got 4"):
        small_work(minibatches=5)


def test_both_make_the_same_passes_and_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    work = small_work(minibatches=2)
    asked: list[tuple[int, int]] = []

    class Reference:
        name, parameters = "another", work.parameters

        def __init__(self, rows: int, steps: int, hidden: int, **_: Any) -> None:
            assert (rows, steps, hidden) == (4, 6, 16)

        def train(self, epochs: int, minibatches: int) -> None:
            asked.append((epochs, minibatches))

    monkeypatch.setattr(recurrent_ppo, "RecurrentPPOWork", Reference)
    reference, left_out = find_update_reference(work)
    assert (reference.name, reference.parameters, left_out) == ("another", work.parameters, "")
    found = compare_updates(work, reference, rounds=2)
    assert asked == [(2, 2)] * 3
    assert found.reference == "another"
    Reference.parameters = 2 * work.parameters
    with pytest.raises(UsageError, match="times the parameters"):
        find_update_reference(work)


def test_without_the_reference_plain_steps_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    work = small_work()
    reference, left_out = find_update_reference(work)
    assert (reference.name, reference.parameters) == ("plain steps", work.parameters)
    assert "gymnasium is not installed (pip install" in left_out
    reference.update()
    assert work.agent.updates_done == 0
    plain, before = work.plain_agent(), weights_of(work.agent)
    work.update()
    work.learn(plain)
    learned = weights_of(work.agent)
    moved, apart = (learned - before).abs().mean(), (weights_of(plain) - learned).abs().mean()
    assert moved > 0
    assert apart < 0.01 * moved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_is_compared_with_as_large_a_reference() -> None:
    pytest.importorskip("sb3_contrib")
    work = UpdateWork(random_lives(2, 3), 512, epochs=1, minibatches=2)
    reference, left_out = find_update_reference(work)
    assert (reference.name, left_out) == ("sb3-contrib RecurrentPPO", "")
    assert compare_updates(work, reference, rounds=1).reference_ms > 0
