from __future__ import annotations

import torch

from benchmarks.problems.graded import GradedProblem


def prices(problem: GradedProblem) -> torch.Tensor:
    """Return the worth of every blueprint in every slot at every step, [B, S, T]."""
    blueprint = torch.tensor(problem.blueprints)
    slot, step = torch.arange(problem.num_slots), torch.arange(problem.steps)
    grid = torch.cartesian_prod(blueprint, slot, step)
    nothing = torch.full_like(grid[:, 0], -1)
    worth = problem.price(grid[:, 0], grid[:, 1], grid[:, 2], nothing)
    return worth.view(len(blueprint), len(slot), len(step))


def test_one_seed_is_worth_one_and_every_choice_counts_by_itself() -> None:
    worth = prices(GradedProblem(1, seed=3))
    assert float(worth.max()) == 1.0
    assert int((worth == 1.0).sum()) == 1
    best = [int(index) for index in (worth == 1.0).nonzero()[0]]
    # Away from the best one, each of the three lowers the worth by its own share.
    for axis, index in enumerate(best):
        line = worth.movedim(axis, 0)[:, *[b for i, b in enumerate(best) if i != axis]]
        assert torch.equal(line.argmax(), torch.tensor(index))
        assert float(line.min()) >= 0.2 - 1e-12
        assert len(set(line.tolist())) > 2


def test_what_pays_is_drawn_from_the_seed() -> None:
    best = {
        tuple((worth == 1.0).nonzero()[0].tolist())
        for worth in (prices(GradedProblem(1, seed=seed)) for seed in range(8))
    }
    assert len(best) > 5
    assert torch.equal(prices(GradedProblem(1, seed=4)), prices(GradedProblem(3, seed=4)))
