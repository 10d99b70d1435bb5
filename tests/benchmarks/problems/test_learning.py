"""Does it learn? The digits recipe's learner on problems whose optimum is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.problems import make_problem
from benchmarks.problems.learning import Mark, learn, learner_config, play_greedily
from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.simic.training.config import get_recipe
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig

SOLVED = 0.95


def reach(name: str, seed: int, rounds: int) -> list[Mark]:
    """Train on the problem of this seed; return where the learner stood on the way."""
    return list(learn(make_problem(name, seed=seed), rounds, seed=seed, every=10))


def test_the_learner_is_that_of_the_digits_recipe() -> None:
    config, recipe = learner_config(make_problem("trap"), 7, seed=3), get_recipe("digits")
    assert config.ppo == recipe.ppo
    assert config.policy == recipe.policy
    assert config.policy.lstm_hidden_dim == 128
    assert (config.rounds, config.rows, config.episode_length, config.seed) == (7, 64, 30, 3)


def test_a_policy_is_judged_by_its_likeliest_actions_without_floors() -> None:
    problem = make_problem("trap", 1)
    policy = new_policy(PolicyConfig(lstm_hidden_dim=16))
    bias = policy.network.op_head[-1].bias
    with torch.no_grad():
        bias[LifecycleOp.WAIT] = 9.0
    assert play_greedily(problem, policy) == 0.0
    with torch.no_grad():
        bias[LifecycleOp.GERMINATE] = 18.0
    # One germination, for its fee, and nothing comes of it: waiting is what it likes best then.
    assert play_greedily(problem, policy) == pytest.approx(-problem.fee)
    assert HEAD_NAMES[-1] == "op"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_graded_is_learned() -> None:
    *_, last = learn(make_problem("graded", seed=1), 60, seed=1, every=10, enough=SOLVED)
    assert last.share >= SOLVED
    assert last.explained_variance is not None
    assert last.explained_variance > 0.5


@pytest.mark.timeout(600)
def test_the_trap_is_escaped() -> None:
    *_, last = learn(make_problem("trap", seed=0), 60, seed=0, every=10, enough=SOLVED)
    assert last.share >= SOLVED


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_graded_is_learned_in_every_seed(seed: int) -> None:
    last = reach("graded", seed, rounds=120)[-1]
    assert last.share >= SOLVED
    assert last.explained_variance is not None
    assert last.explained_variance > 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_the_trap_is_escaped_in_every_seed(seed: int) -> None:
    shares = [mark.share for mark in reach("trap", seed, rounds=100)]
    escaped = next(place for place, share in enumerate(shares) if share >= SOLVED)
    # Whoever is out stays out; one seed that is planted in vain costs a nineteenth of the optimum.
    assert min(shares[escaped:]) > 0.9, shares


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_scaffold_is_found_in_four_of_five_seeds() -> None:
    shares = []
    for seed in range(5):
        problem = make_problem("scaffold", seed=seed)
        marks = list(learn(problem, 150, seed=seed, every=10, enough=SOLVED))
        shares.append(marks[-1].share)
    assert sum(share >= SOLVED for share in shares) >= 4, shares
