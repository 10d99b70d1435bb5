"""Training a policy on a problem, and how much of the optimum it reaches.

The learner is that of the `digits` recipe, setting for setting; only the number of rounds and the
length of the episodes are the problem's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.problems.base import Problem
from benchmarks.problems.optimum import find_optimum
from esper.leyline.controller import ControllerContext
from esper.leyline.slots import BUILTIN_BLUEPRINTS, SlotConfig
from esper.simic.training.config import TrainConfig, get_recipe
from esper.simic.training.episodes import live_episodes
from esper.simic.training.progress import RoundReport
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import Policy

RECIPE = "digits"
"""The recipe whose learner and policy are put to the test."""

Change = Callable[[TrainConfig], TrainConfig]
"""How a comparison differs from the recipe."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a learner stands after some rounds."""

    round: int
    """Rounds trained."""
    share: float
    """Return of the greedy policy over the best possible one."""
    return_mean: float
    """Mean return of the round, exploration included."""
    explained_variance: float | None
    """Share of the variance of returns that the critic foresaw."""
    paid_off: float
    """Running share of episodes that paid."""


def learner_config(problem: Problem, rounds: int, *, seed: int = 0) -> TrainConfig:
    """Return the recipe's configuration for a problem."""
    return get_recipe(RECIPE).replace(
        recipe=problem.name,
        rounds=rounds,
        rows=problem.rows,
        episode_length=problem.steps,
        seed=seed,
        device=problem.device.type,
        recorded_rows=0,
        evaluate_every=0,
    )


def learn(
    problem: Problem,
    rounds: int,
    *,
    seed: int = 0,
    every: int = 10,
    enough: float | None = None,
    change: Change | None = None,
) -> Iterator[Mark]:
    """Train on a problem; yield where the learner stands.

    Args:
        problem: what is to be learned.
        rounds: most rounds.
        seed: of the learner; the problem has its own.
        every: rounds from one greedy episode to the next.
        enough: share of the optimum at which to stop early; None trains all rounds.
        change: how the configuration differs from the recipe's.
    """
    best = find_optimum(problem).value
    config = learner_config(problem, rounds, seed=seed)
    config = config if change is None else change(config)
    trainer = Trainer(config, environment=problem, reward=problem.reward)
    judge = problem.with_rows(1)
    for report in trainer.run():
        done = report.round + 1
        if done % every and done != rounds:
            continue
        mark = _mark(report, play_greedily(judge, trainer.policy) / best)
        yield mark
        if enough is not None and mark.share >= enough:
            return


def play_greedily(problem: Problem, policy: Policy) -> float:
    """Return the mean return of the policy's likeliest actions, without floors."""
    context = ControllerContext(
        slot_names=SlotConfig.of(problem.num_slots).slot_ids,
        blueprint_names=BUILTIN_BLUEPRINTS,
    )
    controller = LearnedController(policy, context, greedy=True)
    total = torch.zeros(problem.rows, dtype=torch.float64, device=problem.device)
    for _ in live_episodes(problem, controller):
        total += problem.paid.sum(1)
    return float(total.mean())


def _mark(report: RoundReport, share: float) -> Mark:
    return Mark(
        round=report.round + 1,
        share=share,
        return_mean=report.outcome.return_mean,
        explained_variance=report.update.explained_variance,
        paid_off=report.paid_off,
    )
