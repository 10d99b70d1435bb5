"""The dynamic program against every legal action of tiny problems, and its plan in the problem."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.problems import (
    PROBLEMS,
    GradedProblem,
    Problem,
    ScaffoldProblem,
    TrapProblem,
    find_optimum,
    make_problem,
)
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, HEAD_SIZES, PLACEHOLDERS, LifecycleOp
from esper.leyline.rules import RulesConfig


def life(*, auto: bool = False, min_prune_age: int = 1, training: int = 1) -> LifecycleConfig:
    return LifecycleConfig(
        gates=GateConfig(min_training_epochs=training),
        rules=RulesConfig(min_prune_age=min_prune_age),
        embargo_ticks=1,
        auto_training=auto,
        auto_blending=auto,
        auto_holding=auto,
    )


def play(problem: Problem, plan: list[dict[str, int]]) -> float:
    """Return what a plan earns in the problem itself."""
    problem.reset()
    total = 0.0
    for step in plan:
        rows = {head: torch.full((problem.rows,), index) for head, index in step.items()}
        problem.step(rows)
        assert torch.equal(problem.paid, problem.paid[:1].expand_as(problem.paid))
        total += float(problem.paid[0].sum())
    return total


def every_action(problem: Problem) -> Tensor:
    """Return all joint actions that differ in effect, int64 [N, 8]."""
    rows = []
    # Curves and styles change how an amplitude moves, not when it arrives.
    sizes = {**HEAD_SIZES, "slot": problem.num_slots, "style": 1, "alpha_curve": 1}
    for op in LifecycleOp:
        ranges = []
        for head in HEAD_NAMES:
            if head == "op":
                ranges.append([int(op)])
            elif head == "blueprint" and op is LifecycleOp.GERMINATE:
                ranges.append(list(problem.blueprints))
            elif head in CAUSAL_HEADS[op]:
                ranges.append(list(range(sizes[head])))
            else:
                ranges.append([int(PLACEHOLDERS[head])])
        rows += list(itertools.product(*ranges))
    return torch.tensor(rows)


LEADS_ON = (
    "stage",
    "blueprint",
    "tempo",
    "blend_target",
    "alpha",
    "alpha_start",
    "alpha_target",
    "alpha_mode",
    "steps_total",
    "steps_done",
    "epochs_in_stage",
    "age",
    "cooldown",
)
"""What a seed's future depends on; the rest of its record is about the past."""


def search(problem: Problem) -> float:
    """Return the best return over all sequences of legal actions, by exhaustion.

    States with the same future are one state with the better return so far.
    """
    problem = problem.with_rows(1)
    problem.reset()
    saved, earned = problem.snapshot(), torch.zeros(1, dtype=torch.float64)
    actions = every_action(problem)
    for _ in range(problem.steps):
        rows = len(earned)
        spread = torch.arange(rows).repeat_interleave(len(actions))
        chosen = actions.repeat(rows, 1)
        wide = problem.with_rows(len(spread))
        wide.restore(_map(saved, lambda tensor, index=spread: tensor[index]))
        wide.step(dict(zip(HEAD_NAMES, chosen.unbind(1), strict=True)))
        total = earned[spread] + wide.paid.sum(1)
        wide.paid = torch.zeros_like(wide.paid)
        wide.group.last_op, wide.group.last_success = spread * 0, spread >= 0
        saved, earned = _merge(wide.snapshot(), total)
    return float(earned.max())


def _map(tree: dict[str, Any], change: Any) -> dict[str, Any]:
    """Change every tensor of a snapshot; the imagined rows have no weights to choose from."""
    return {
        name: _map(value, change) if isinstance(value, dict) else change(value)
        for name, value in tree.items()
        if not isinstance(value, list)
    } | {name: [] for name, value in tree.items() if isinstance(value, list)}


def _merge(saved: dict[str, Any], earned: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Keep one row per distinct state, with the highest return that led to it."""
    state = saved["rows"]["state"]
    parts = [state[name] for name in LEADS_ON] + [torch.isfinite(state["contribution"])]
    parts += [saved["worth"], saved["scaffolded"][:, None], saved["pending"][:, None]]
    keys = torch.cat([each.double() for each in parts], 1)
    _, groups = torch.unique(keys, dim=0, return_inverse=True)
    best = torch.full((int(groups.max()) + 1,), -torch.inf, dtype=torch.float64)
    best.scatter_reduce_(0, groups, earned, "amax")
    first = torch.full_like(best, len(earned), dtype=torch.int64)
    first.scatter_reduce_(0, groups, torch.arange(len(earned)), "amin")
    return _map(saved, lambda tensor: tensor[first]), best


@pytest.mark.parametrize("name", sorted(PROBLEMS))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_plan_earns_exactly_what_was_computed(name: str, seed: int) -> None:
    problem = make_problem(name, 2, seed=seed)
    optimum = find_optimum(problem)
    assert len(optimum.plan) == problem.steps
    assert optimum.value > 0.5
    assert play(problem, list(optimum.plan)) == pytest.approx(optimum.value, abs=1e-12)


TINY: dict[str, Problem] = {
    "graded": GradedProblem(1, steps=8, slots=1, blueprints=(1, 2), lifecycle=life()),
    "graded auto": GradedProblem(
        1, steps=7, slots=2, blueprints=(1, 2), lifecycle=life(auto=True), fee=0.3
    ),
    "trap": TrapProblem(1, steps=9, slots=1, blueprints=(1, 2), lifecycle=life(), window=2),
    "trap too late": TrapProblem(1, steps=5, slots=1, blueprints=(1, 2), lifecycle=life()),
    "scaffold": ScaffoldProblem(
        1,
        steps=11,
        slots=1,
        blueprints=(1, 2),
        lifecycle=life(auto=True, min_prune_age=2),
        gap=4,
        life=2,
        fee=0.1,
        loss=-0.2,
        hindsight=0.2,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "scaffold" else name
        for name in sorted(TINY)
    ],
)
def test_no_sequence_of_legal_actions_earns_more(name: str) -> None:
    problem = TINY[name]
    optimum = find_optimum(problem)
    assert search(problem) == pytest.approx(optimum.value, abs=1e-12)
    assert play(problem, list(optimum.plan)) == pytest.approx(optimum.value, abs=1e-12)


def test_with_too_little_time_the_best_is_to_wait() -> None:
    optimum = find_optimum(TINY["trap too late"])
    assert optimum.value == 0.0
    assert all(step["op"] == int(LifecycleOp.WAIT) for step in optimum.plan)
