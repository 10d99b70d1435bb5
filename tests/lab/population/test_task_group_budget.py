"""Populations whose rows spend a budget of compute instead of a number of passes."""

from __future__ import annotations

import math

import pytest
import torch

from esper.kasmina.contribution import count_ablations
from esper.lab.population.engine import Strategy
from esper.lab.population.population import Population
from esper.lab.tasks.task import Task
from esper.leyline.errors import ConfigError
from esper.leyline.signals import Signals
from tests.lab.population.tiny_tasks import (
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    assert_close,
    assert_rows_agree,
    do,
    germinate,
    make_config,
    populations,
    row_tree,
)
from tests.plots import same

EPOCHS = 8


def tasks(**changes: object) -> list[Task]:
    """One task of every topology, each with another budget."""
    return [
        kind(kind.defaults.replace(horizon=EPOCHS, budget=budget, **changes))
        for kind, budget in ((TinyImages, "2.5x"), (TinyText, "2x"), (TinyValues, "4x"))
    ]


def make(strategy: Strategy = "sequential", given: list[Task] | None = None) -> Population:
    rows = [3] * len(given or tasks())
    settings = make_config(precision="float64", workers=2)
    return Population(given or tasks(), rows, 3, "cpu", strategy, config=settings)


def play(population: Population, steps: int = EPOCHS - 1) -> list[Signals]:
    """Let one row of every task grow at once, and another one later."""
    seen = [population.reset()]
    conv, attention, mlp = (germinate(name) for name in ("conv_light", "attention", "mlp_small"))
    wait = {"op": 0}
    script = {
        0: [conv, wait, wait, attention, wait, wait, mlp],
        2: [advance(), conv, wait, advance(), attention, wait, advance(), mlp],
        4: [wait, advance(), wait, wait, advance(), wait, wait, advance()],
    }
    for step in range(steps):
        seen.append(do(population, *script.get(step, [])[: population.rows]))
    return seen


def test_a_small_network_takes_more_steps_and_all_spend_their_budget() -> None:
    with populations(make()) as (population,):
        seen = play(population)
        last, groups = seen[-1], population.groups
        samples = torch.cat([group.seen for group in groups])
        batch = torch.cat([group.facts.batch_samples for group in groups])
        validated = torch.cat([group.facts.val_samples for group in groups])
        assert (last.occupied.any(1)).tolist() == [True, True, False] * 3
        for first in (0, 3, 6):
            grown, later, waiting = samples[first : first + 3].tolist()
            assert grown < later < waiting
        # What is left would not have paid for another step.
        left = last.compute_budget - last.compute_spent
        assert ((left >= 0) & (left < 3 * batch * last.flops)).all()
        spent = torch.zeros_like(last.compute_spent)
        for epoch, signals in enumerate(seen, start=1):
            cost = signals.compute_spent - spent
            spent = signals.compute_spent
            members = (signals.alpha > 0) & (signals.stage >= 0) & (signals.stage != 7)
            configurations = torch.tensor([count_ablations(n) for n in members.sum(1).tolist()])
            steps = (cost - configurations * validated * signals.flops) / (
                3 * batch * signals.flops
            )
            assert steps.tolist() == [max(1, round(step)) for step in steps.tolist()]
            share = signals.compute_budget * epoch // EPOCHS
            assert (spent <= share).all()


@pytest.mark.parametrize("strategy", ["stacked", pytest.param("workers", marks=pytest.mark.slow)])
def test_all_strategies_spend_a_budget_alike(strategy: Strategy) -> None:
    with populations(make(), make(strategy)) as (plain, other):
        for here, there in zip(play(plain), play(other), strict=True):
            for name in ("stage", "compute_spent", "flops"):
                assert torch.equal(getattr(here, name), getattr(there, name)), name
            for name in ("val_loss", "train_loss", "contribution", "grad_norm"):
                assert_close(getattr(here, name), getattr(there, name), 2e-7, name)
        assert_rows_agree(plain, other, 1e-9)


def test_a_stack_leaves_out_rows_that_are_done() -> None:
    with populations(make("stacked", tasks()[:1])) as (population,):
        population.reset()
        engine, seen = population.groups[0].engine, []
        run = engine._run_step

        def note() -> None:
            rows = engine._phase.rows
            seen.append(3 if rows is None else len(rows))
            run()

        engine._run_step = note
        play(population)
        assert 3 in seen
        assert min(seen) < 3


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_rows_go_on_from_a_snapshot_exactly(strategy: Strategy) -> None:
    with populations(make(strategy), make("sequential")) as (population, other):
        play(population, 6)
        saved = population.snapshot()
        ahead = [do(population) for _ in range(3)]
        other.restore(saved)
        again = [do(other) for _ in range(3)]
        for here, there in zip(ahead, again, strict=True):
            assert torch.equal(here.compute_spent, there.compute_spent)
            assert_close(here.val_loss, there.val_loss, 2e-7, "val_loss")
        population.restore(saved)
        forked = population.fork([4, 0])
        for _ in range(3):
            do(population), do(forked)
        for here, there in ((0, 0), (4, 1)):
            assert same(row_tree(population, here), row_tree(forked, there))
        forked.close()


def test_nothing_grows_that_the_rest_of_the_budget_does_not_pay_for() -> None:
    task = TinyValues(TinyValues.defaults.replace(horizon=3, validation_samples=1, budget=20_000))
    with populations(make(given=[task])) as (population,):
        signals = population.reset()
        group = population.groups[0]
        assert group.table.affordable is not None
        affordable = group.table.affordable.tolist()
        fits = population.view().fits
        assert not fits.all()
        for row, most in enumerate(affordable):
            costs = signals.flops[row] + signals.seed_flops[row]
            possible = signals.seed_flops[row] >= 0
            assert torch.equal(fits[row], possible & (costs <= most))
        unlimited = TinyValues(task.config.replace(budget=None))
        with populations(make(given=[unlimited])) as (free,):
            free.reset()
            assert free.view().fits.sum() > fits.sum()
            assert free.signals().compute_budget.tolist() == [-1] * 3
            assert free.signals().compute_spent.tolist() == [0] * 3


def test_rates_follow_the_share_that_is_spent() -> None:
    given = [tasks(schedule="cosine", warmup=0.0)[0]]
    with populations(make(given=given)) as (population,):
        for signals in play(population)[:-1]:
            share = signals.compute_budget * signals.epoch // EPOCHS / signals.compute_budget
            expected = 0.5 * (1 + torch.cos(math.pi * share.float()))
            torch.testing.assert_close(signals.rate_factor, expected, atol=1e-4, rtol=0)


def test_a_budget_without_a_step_in_every_share_is_refused() -> None:
    task = TinyValues(TinyValues.defaults.replace(budget=100.0))
    with pytest.raises(ConfigError, match="a budget of 100 FLOPs is too small for 60 epochs"):
        Population(task, 1, device="cpu").reset()
