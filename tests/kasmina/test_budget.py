"""Budgets of compute: how they are written, and what rows train within them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.kasmina.budget import (
    NO_BUDGET,
    Portion,
    affordable_flops,
    count_budget,
    parse_budget,
    plan_portions,
    share_left,
)
from esper.kasmina.signals import row_facts
from esper.leyline.errors import ConfigError

RUN = {"host_flops": 10, "samples_per_epoch": 100, "batch_samples": 20, "val_samples": 30}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (2e12, 2e12),
        (5, 5.0),
        ("2e12", 2e12),
        ("10x", "10x"),
        (" 0.5X ", "0.5x"),
        ("3.3333333333333335x", "3.3333333333333335x"),
    ],
)
def test_a_budget_is_flops_or_a_multiple(given: float | str, meant: float | str) -> None:
    assert parse_budget(given) == meant


@pytest.mark.parametrize("given", [0, -1.0, "x", "ten", "0x", True, float("nan"), float("inf")])
def test_other_budgets_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget must be .*'10x'"):
        parse_budget(given)


def test_once_the_host_is_its_training_and_its_evaluation() -> None:
    whole = 60 * (3 * 10 * 100 + 10 * 30)
    assert count_budget("1x", **RUN, epochs=60) == whole
    assert count_budget("2.5x", **RUN, epochs=60) == 2.5 * whole
    assert count_budget(1e6, **RUN, epochs=60) == 1_000_000
    with pytest.raises(ConfigError, match="too small for 60 epochs"):
        count_budget(50_000.0, **RUN, epochs=60)


def test_steps_follow_from_what_a_step_costs_and_remainders_are_carried_over() -> None:
    facts = row_facts(
        3,
        horizon=10,
        budget=1,
        samples_per_epoch=7,
        batch_samples=4,
        compute=torch.tensor([10_000, 10_000, NO_BUDGET]),
    )
    flops, spent, seen = torch.tensor([10, 37, 10]), torch.zeros(3).long(), torch.zeros(3).long()
    for epoch in range(1, 11):
        now = torch.full((3,), epoch)
        portions = plan_portions(facts, now, seen, flops, share_left(facts, now, spent))
        assert portions[2] == Portion(epoch, 7 * (epoch - 1), 7)
        assert [portion.first for portion in portions[:2]] == seen[:2].tolist()
        samples = torch.tensor([portion.samples for portion in portions])
        seen, spent = seen + samples, spent + 3 * flops * samples
        for row, step in ((0, 120), (1, 444)):
            assert 0 <= 1_000 * epoch - int(spent[row]) < step, "nothing drifts"
    assert seen[:2].tolist() == [4 * (10_000 // 120), 4 * (10_000 // 444)]


def test_a_large_budget_does_not_overflow() -> None:
    facts = row_facts(1, horizon=60, budget=1, compute=2**61)
    assert share_left(facts, torch.tensor([60]), torch.tensor([0])) == [2**61]


def test_a_step_and_two_evaluations_must_fit_into_every_share_that_is_left() -> None:
    facts = row_facts(
        2,
        horizon=10,
        budget=1,
        batch_samples=20,
        val_samples=30,
        compute=torch.tensor([12_000, NO_BUDGET]),
    )
    epoch = torch.tensor([5, 5])
    assert affordable_flops(facts, epoch, torch.tensor([6_000, 0])).tolist() == [10, NO_BUDGET]
    assert affordable_flops(facts, epoch, torch.tensor([13_000, 0])).tolist() == [0, NO_BUDGET]
