"""Evaluation: a controller on fresh seeds against the same networks that only wait.

    evaluator = Evaluator(config, seeds=20)
    result = evaluator.evaluate(policy)
    print(paired_interval(result.test_gains))

Every seed is played by the controller and by its waiting twin, with the same initial weights and
data order, so differences are paired. Seeds of an evaluation are never seeds of training. The test
split is touched once, when the episodes are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.slots import SlotConfig
from esper.population.population import Population
from esper.simic.rewards import make_reward
from esper.simic.training.config import TrainConfig
from esper.simic.training.environment import Environment
from esper.simic.training.episodes import play_episodes
from esper.simic.training.interval import Interval, paired_interval
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.world import TaskWorld
from esper.tamiyo.controllers import LearnedController, WaitController, make_controller
from esper.tamiyo.controllers.policy_file import Policy

__all__ = ["Evaluation", "Evaluator", "Interval", "evaluate_policy", "paired_interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a controller brought, seed by seed; tensors [N] on the CPU."""

    tasks: Sequence[str]
    seeds: Sequence[int]
    val_scores: Tensor
    """float64, final validation score."""
    twin_val_scores: Tensor
    """float64, the waiting twin's."""
    test_scores: Tensor
    """float64, NaN where the test split was left alone."""
    twin_test_scores: Tensor
    """float64, the waiting twin's."""
    returns: Tensor
    """float64, sums of raw rewards."""
    twin_returns: Tensor
    """float64, what waiting pays."""
    germinated: Tensor
    """int64, seeds germinated."""
    fossilized: Tensor
    """int64, seeds fossilized."""
    pruned: Tensor
    """int64, seeds pruned."""
    early_germinated: Tensor
    """int64, seeds germinated in the first 60 % of the episode."""
    early_fossilized: Tensor
    """int64, those of them that were fossilized."""
    parameter_ratios: Tensor
    """float64, parameters at the end over the host's."""
    op_counts: dict[str, int]
    """How often every op was taken."""

    @property
    def test_gains(self) -> Tensor:
        """float64, test score minus the twin's."""
        return self.test_scores - self.twin_test_scores

    @property
    def val_gains(self) -> Tensor:
        """float64, validation score minus the twin's."""
        return self.val_scores - self.twin_val_scores

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def val_gain_mean(self) -> float:
        """Mean gain on the validation samples."""
        return float(self.val_gains.mean())

    @property
    def early_fossilization(self) -> float | None:
        """Share of the early seeds that were fossilized; None without early seeds."""
        early = int(self.early_germinated.sum())
        return int(self.early_fossilized.sum()) / early if early else None

    def to_mapping(self) -> dict[str, Any]:
        """Return the figures as plain data, seed by seed and together."""
        tensors = {
            name: getattr(self, name).tolist()
            for name in (
                *("val_scores", "twin_val_scores", "test_scores", "twin_test_scores"),
                *("returns", "twin_returns", "germinated", "fossilized", "pruned"),
                *("early_germinated", "early_fossilized", "parameter_ratios"),
            )
        }
        return {
            "tasks": list(self.tasks),
            "seeds": list(self.seeds),
            **tensors,
            "op_counts": self.op_counts,
            "early_fossilization": self.early_fossilization,
        }


class Evaluator:
    """Plays the same fresh seeds with one controller after another; twins are played once.

    Args:
        config: tasks, episode length, reward and how rows live.
        seeds: how many seeds of every task or family.
        first_seed: number of the first of them.
        touch_test: whether the test split is scored at the end.
        world: where the populations come from, to share the data it has read.
    """

    def __init__(
        self,
        config: TrainConfig,
        seeds: int = 20,
        *,
        first_seed: int = 0,
        touch_test: bool = True,
        world: TaskWorld | None = None,
    ) -> None:
        """Look the tasks up; nothing is played yet."""
        self.config = config
        self._world = world or TaskWorld(config)
        self._numbers = range(first_seed, first_seed + seeds)
        self._touch_test = touch_test
        self._twins: tuple[Tensor, RoundOutcome, Tensor] | None = None

    def evaluate(self, controller: Policy | Controller | str, *, greedy: bool = True) -> Evaluation:
        """Play every seed once and compare it with its twin.

        Args:
            controller: a policy, a controller, or the name of one as on the command line.
            greedy: whether a policy takes its likeliest actions or draws.
        """
        curves, waiting, twin_test = self._play_twins()
        plan, population = self._world.evaluation(self._numbers)
        try:
            chosen = self._controller(controller, population, greedy)
            outcome = play_episodes(
                population, chosen, make_reward(self.config.reward), plan, curves
            )
            test = self._test_scores(population)
        finally:
            population.close()
        seeds, early = outcome.seeds, outcome.early_seeds
        return Evaluation(
            tasks=plan.tasks,
            seeds=plan.env_seeds,
            val_scores=outcome.final_scores,
            twin_val_scores=outcome.twin_scores,
            test_scores=test,
            twin_test_scores=twin_test,
            returns=outcome.returns,
            twin_returns=waiting.returns,
            germinated=seeds.germinated.sum((1, 2)),
            fossilized=seeds.fossilized.sum((1, 2)),
            pruned=seeds.pruned.sum((1, 2)),
            early_germinated=early[:, 0],
            early_fossilized=early[:, 1],
            parameter_ratios=outcome.parameters.double() / outcome.host_parameters.double(),
            op_counts=outcome.op_counts(),
        )

    def _play_twins(self) -> tuple[Tensor, RoundOutcome, Tensor]:
        """Return the twins' curves [N, epochs], what waiting paid, and the twins' test scores."""
        if self._twins is None:
            plan, population = self._world.evaluation(self._numbers)
            try:
                # A waiting row is its own twin, so whatever it scores is no gain; the curve is
                # known only afterwards, and a reward that needs it is paid none.
                nothing = torch.zeros(plan.rows, self.config.epochs)
                reward = make_reward(self.config.reward)
                waiting = play_episodes(population, WaitController(), reward, plan, nothing)
                test = self._test_scores(population)
            finally:
                population.close()
            self._twins = (waiting.states["val_score"], waiting, test)
        return self._twins

    def _test_scores(self, population: Population) -> Tensor:
        if not self._touch_test:
            return torch.full((population.rows,), torch.nan, dtype=torch.float64)
        return population.test_scores()

    def _controller(
        self, controller: Policy | Controller | str, environment: Environment, greedy: bool
    ) -> Controller:
        context = ControllerContext(
            slot_names=SlotConfig.of(environment.num_slots).slot_ids,
            blueprint_names=self._world.blueprint_names,
            seed=self.config.seed,
        )
        if isinstance(controller, Policy):
            return LearnedController(controller, context, greedy=greedy)
        return make_controller(controller, context)


def evaluate_policy(
    policy: Policy,
    config: TrainConfig,
    seeds: int = 20,
    *,
    greedy: bool = True,
    touch_test: bool = True,
) -> Evaluation:
    """Play fresh seeds with a policy and with their waiting twins."""
    return Evaluator(config, seeds, touch_test=touch_test).evaluate(policy, greedy=greedy)
