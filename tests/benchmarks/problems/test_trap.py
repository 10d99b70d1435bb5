from __future__ import annotations

import torch

from benchmarks.problems.trap import TrapProblem
from esper.leyline.actions import LifecycleOp
from esper.tamiyo.controllers.baselines import RandomController


def test_one_blueprint_in_one_slot_in_one_window_pays() -> None:
    problem = TrapProblem(1, seed=5)
    grid = torch.cartesian_prod(torch.tensor(problem.blueprints), torch.arange(3), torch.arange(30))
    worth = problem.price(grid[:, 0], grid[:, 1], grid[:, 2], torch.full_like(grid[:, 0], -1))
    paying = grid[worth > 0].tolist()
    first = problem.first_step
    assert paying == [
        [problem.right_blueprint, problem.right_slot, step] for step in range(first, first + 5)
    ]
    assert set(worth.tolist()) == {1.0, -0.5}


def test_acting_at_random_loses_against_waiting() -> None:
    problem = TrapProblem(256, seed=1)
    controller = RandomController(seed=2)
    controller.reset(problem.rows, "cpu")
    signals, total = problem.reset(), torch.zeros(256, dtype=torch.float64)
    germinated = 0
    for _ in range(problem.steps):
        actions = controller.act(signals, problem.masks())
        germinated += int((actions["op"] == int(LifecycleOp.GERMINATE)).sum())
        signals = problem.step(actions)
        total += problem.paid.sum(1)
    assert germinated > 256
    assert float(total.mean()) < -0.05
    assert float((total > 0).double().mean()) < 0.03
