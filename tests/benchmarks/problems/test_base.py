from __future__ import annotations

import pytest
import torch

from benchmarks.problems.base import POINTS, Problem
from benchmarks.problems.trap import TrapProblem
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.simic.rewards.contract import Reward, Transition
from esper.simic.training.row_source import Environment


def act(problem: Problem, op: LifecycleOp, slot: int = 0, blueprint: int = 0) -> Signals:
    actions = placeholder_actions(problem.rows)
    actions["op"].fill_(int(op))
    actions["slot"].fill_(slot)
    actions["blueprint"].fill_(blueprint)
    return problem.step(actions)


def grow(problem: TrapProblem, blueprint: int, slot: int) -> Signals:
    """Germinate within the window and wait until the seed holds."""
    signals = problem.reset()
    while int(signals.epoch[0]) <= problem.first_step:
        signals = act(problem, LifecycleOp.WAIT)
    signals = act(problem, LifecycleOp.GERMINATE, slot, blueprint)
    while int(signals.stage[0, slot]) != int(SeedStage.HOLDING):
        signals = act(problem, LifecycleOp.WAIT)
    return signals


def test_a_problem_is_an_environment_with_a_reward() -> None:
    problem = TrapProblem(3)
    environment: Environment = problem
    reward: Reward = problem.reward
    signals = environment.reset([7, 8, 9])
    assert (signals.rows, signals.num_slots) == (3, 3)
    assert signals.epoch.tolist() == [1, 1, 1]
    assert signals.max_epochs.tolist() == [31, 31, 31]
    assert reward.needs_twin is False
    masks = environment.masks()
    assert masks.op[0].nonzero().flatten().tolist() == [0, int(LifecycleOp.GERMINATE)]
    assert masks.blueprint_by_slot[0, 0].nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_waiting_pays_nothing_and_ends_at_the_horizon() -> None:
    problem = TrapProblem(2, steps=6)
    signals = problem.reset()
    for _ in range(6):
        signals = act(problem, LifecycleOp.WAIT)
        assert not problem.paid.any()
    assert torch.equal(signals.epoch, signals.max_epochs)
    assert torch.allclose(signals.val_score, signals.twin_score)


def test_a_seeds_worth_shows_in_its_contribution_and_is_paid_when_it_is_fossilized() -> None:
    problem = TrapProblem(2)
    signals = grow(problem, problem.right_blueprint, problem.right_slot)
    slot = problem.right_slot
    assert float(signals.contribution[0, slot]) == pytest.approx(POINTS)
    assert float(signals.val_score[0] - signals.twin_score[0]) == pytest.approx(POINTS, abs=1e-4)
    signals = act(problem, LifecycleOp.FOSSILIZE, slot)
    assert problem.paid[0].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert int(signals.stage[0, slot]) == int(SeedStage.FOSSILIZED)
    # One seed is all there may be.
    assert not problem.masks().op[0, LifecycleOp.GERMINATE]


def test_a_germination_costs_its_fee_and_a_wrong_seed_its_loss() -> None:
    problem = TrapProblem(1)
    problem.reset()
    wrong = 1 + problem.right_blueprint % 7
    act(problem, LifecycleOp.GERMINATE, 0, wrong)
    assert problem.paid[0].tolist() == pytest.approx([0.0, -0.05, 0.0])
    grow(problem, wrong, 0)
    act(problem, LifecycleOp.FOSSILIZE, 0)
    assert problem.paid[0].tolist() == pytest.approx([-0.5, 0.0, 0.0])


def test_an_illegal_operation_changes_and_costs_nothing() -> None:
    problem = TrapProblem(1)
    problem.reset()
    signals = act(problem, LifecycleOp.FOSSILIZE, 0)
    assert not bool(signals.last_success[0])
    assert not problem.paid.any()
    assert not problem.worth.any()


def test_the_reward_is_what_was_paid_and_nothing_in_rows_that_have_ended() -> None:
    problem = TrapProblem(2)
    before = problem.reset()
    problem.reward.reset(before)
    actions = placeholder_actions(2)
    actions["op"].fill_(int(LifecycleOp.GERMINATE))
    actions["blueprint"].fill_(3)
    after = problem.step(actions)
    nothing = torch.full((2,), torch.nan)
    paid = problem.reward.step(
        Transition(
            before=before,
            actions=actions,
            after=after,
            twin_before=nothing,
            twin_after=nothing,
            is_last=torch.zeros(2, dtype=torch.bool),
            active=torch.tensor([True, False]),
        )
    )
    assert set(paid.terms) == {"gain", "action", "hindsight"}
    assert paid.total.tolist() == pytest.approx([-0.05, 0.0])


def test_a_snapshot_goes_on_exactly() -> None:
    problem = TrapProblem(2)
    grow(problem, problem.right_blueprint, problem.right_slot)
    saved = problem.snapshot()
    first = act(problem, LifecycleOp.FOSSILIZE, problem.right_slot)
    paid = problem.paid.clone()
    other = TrapProblem(2)
    other.restore(saved)
    second = act(other, LifecycleOp.FOSSILIZE, problem.right_slot)
    assert torch.equal(other.paid, paid)
    for name in ("val_score", "stage", "age", "epoch"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    many, one = TrapProblem(5), TrapProblem(5).with_rows(1)
    one.reset()
    many.reset()
    for step in range(8):
        op = LifecycleOp.GERMINATE if step == 2 else LifecycleOp.WAIT
        ours, theirs = act(many, op, 1, 4), act(one, op, 1, 4)
        assert torch.equal(ours.val_score[:1], theirs.val_score)
        assert torch.equal(ours.stage[:1], theirs.stage)


def test_misuse_is_told() -> None:
    with pytest.raises(UsageError, match="reset"):
        TrapProblem(1).masks()
    with pytest.raises(UsageError, match="2 entries"):
        TrapProblem(2).reset([1])
    with pytest.raises(UsageError, match="permissive"):
        TrapProblem(1, lifecycle=LifecycleConfig(gates=GateConfig(kind="strict")))
