from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from esper.kasmina.imagined_hosts import random_lives
from esper.leyline.errors import UsageError
from esper.simic.agent import throughput
from esper.simic.agent.throughput import UpdateWork, compare_updates


def small_work(minibatches: int = 2) -> UpdateWork:
    return UpdateWork(random_lives(4, 6), 16, epochs=2, minibatches=minibatches)


def test_an_update_really_learns() -> None:
    work = small_work()
    before = work.agent.network.op_head[-1].weight.detach().clone()
    work.update()
    assert work.agent.updates_done == 1
    assert not torch.equal(before, work.agent.network.op_head[-1].weight)
    assert work.buffer.batch().valid.all()


def test_both_make_the_same_passes_and_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    work = small_work(minibatches=2)
    asked: list[tuple[int, int]] = []

    class Reference:
        name, parameters = "another", work.parameters

        def __init__(self, rows: int, steps: int, hidden: int, **_: Any) -> None:
            assert (rows, steps, hidden) == (4, 6, 16)

        def train(self, epochs: int, minibatches: int) -> None:
            asked.append((epochs, minibatches))

    monkeypatch.setattr(throughput, "RecurrentPPOWork", Reference)
    found, parameters = compare_updates(work, rounds=2)
    assert asked == [(2, 2)] * 3
    assert parameters == work.parameters
    assert found.reference == "another"
    Reference.parameters = 2 * work.parameters
    with pytest.raises(UsageError, match="not fair"):
        compare_updates(work, rounds=1)


def test_the_reference_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError):
        compare_updates(small_work(), rounds=1)
