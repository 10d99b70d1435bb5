from __future__ import annotations

import pytest
import torch

from benchmarks.problems.scaffold import ScaffoldProblem
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.stages import SeedStage


def play(problem: ScaffoldProblem, plan: dict[int, tuple[LifecycleOp, int]]) -> torch.Tensor:
    """Carry out a plan of {step: (op, blueprint)} in slot 0; return what was paid by step."""
    problem.reset()
    paid = []
    for step in range(problem.steps):
        op, blueprint = plan.get(step, (LifecycleOp.WAIT, 0))
        actions = placeholder_actions(problem.rows)
        actions["op"].fill_(int(op))
        actions["blueprint"].fill_(blueprint)
        problem.step(actions)
        paid.append(problem.paid[0].clone())
    return torch.stack(paid)


def generations(
    problem: ScaffoldProblem, *, first: int, pruned: int, second: int, fossilized: int
) -> dict[int, tuple[LifecycleOp, int]]:
    return {
        first: (LifecycleOp.GERMINATE, problem.scaffold),
        pruned: (LifecycleOp.PRUNE, 0),
        second: (LifecycleOp.GERMINATE, problem.beneficiary),
        fossilized: (LifecycleOp.FOSSILIZE, 0),
    }


def test_b_pays_after_an_a_that_lived_and_was_pruned_fifty_steps_before() -> None:
    problem = ScaffoldProblem(1, hindsight=0.2)
    assert problem.gap == 50
    plan = generations(problem, first=2, pruned=12, second=62, fossilized=80)
    paid = play(problem, plan)
    assert paid[80].tolist() == pytest.approx([1.0, 0.0, 0.0])
    # The credit for A comes in the step after.
    assert paid[81].tolist() == pytest.approx([0.0, 0.0, 0.2])
    assert float(paid.sum()) == pytest.approx(1.2)


def test_credit_earned_in_the_last_step_is_paid_in_it() -> None:
    problem = ScaffoldProblem(1, hindsight=0.2)
    plan = generations(problem, first=2, pruned=12, second=62, fossilized=problem.steps - 1)
    assert play(problem, plan)[-1].tolist() == pytest.approx([1.0, 0.0, 0.2])


@pytest.mark.parametrize(
    ("first", "pruned", "second"),
    [(2, 12, 61), (2, 4, 60)],
    ids=["too early", "A lived too short"],
)
def test_b_pays_nothing_otherwise(first: int, pruned: int, second: int) -> None:
    problem = ScaffoldProblem(1)
    plan = generations(problem, first=first, pruned=pruned, second=second, fossilized=80)
    assert not play(problem, plan).any()
    assert int(problem.state.stage[0, 0]) == int(SeedStage.FOSSILIZED)


def test_b_pays_nothing_without_a() -> None:
    problem = ScaffoldProblem(1)
    plan = {
        60: (LifecycleOp.GERMINATE, problem.beneficiary),
        80: (LifecycleOp.FOSSILIZE, 0),
    }
    assert not play(problem, plan).any()
    assert int(problem.state.stage[0, 0]) == int(SeedStage.FOSSILIZED)


def test_nothing_that_is_observed_tells_that_a_lived() -> None:
    problem = ScaffoldProblem(1)
    plan = generations(problem, first=2, pruned=12, second=200, fossilized=201)
    play(problem, plan)
    after = problem.signals()
    play(problem, {})
    for name in ("stage", "blueprint", "last_op", "last_success", "age", "params"):
        assert torch.equal(getattr(after, name), getattr(problem.signals(), name))
    # A is worth nothing by itself, so that no score remembers it either.
    assert torch.allclose(after.score_history, problem.signals().score_history)
