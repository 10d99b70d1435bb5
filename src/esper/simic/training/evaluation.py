"""Evaluation of a controller on new seeds, against twins that do not grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor

from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import UsageError
from esper.leyline.records import copy_fields
from esper.leyline.slots import SlotConfig
from esper.simic.rewards import make_reward
from esper.simic.rewards.contract import Reward
from esper.simic.training.config import TrainConfig
from esper.simic.training.episodes import Episodes
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.row_source import Environment, RoundPlan, TaskRows
from esper.simic.training.traces import Trace, decision_columns, state_columns
from esper.tamiyo.controllers import LearnedController, WaitController, make_controller
from esper.tamiyo.controllers.policy_file import Policy


def play_episodes(
    environment: Environment,
    controller: Controller,
    reward: Reward,
    plan: RoundPlan,
    twins: Tensor | None = None,
) -> RoundOutcome:
    """Let a controller play one episode in every row, and return the outcome.

    Args:
        environment: the rows.
        controller: chooses the actions.
        reward: computes the rewards.
        plan: tasks and seeds of the rows.
        twins: float32 [rows, epochs], scores of the twins; None without twins.
    """
    rows, device = environment.rows, environment.device
    episodes = Episodes(environment, reward)
    episodes.start(plan, twins)
    controller.reset(rows, device)
    steps = int((episodes.signals.max_epochs - episodes.signals.epoch).max())
    decisions, states = Trace(rows, steps), Trace(rows, steps + 1)
    names: tuple[str, ...] = ()
    states.put(0, state_columns(episodes.signals, episodes.twin_scores))
    while bool(episodes.active.any()):
        masks = environment.masks().to(device)
        chosen = controller.act(episodes.signals, masks)
        transition, paid = episodes.step({head: each.to(device) for head, each in chosen.items()})
        names, op = tuple(paid.terms), transition.actions["op"]
        kept = decision_columns(transition, op, paid, free=masks.op.sum(1) > 1)
        decisions.put(decisions.length, kept)
        states.put(decisions.length, state_columns(episodes.signals, episodes.twin_scores))
    played = {"decisions": decisions.read(), "states": states.read()}
    return copy_fields(RoundOutcome, plan, **played, term_names=names)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}] (n = {self.count})"


def paired_interval(differences: Tensor | Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of paired differences [N] with its t-interval.

    Args:
        differences: one number per pair, such as a network's score minus its twin's.
        confidence: confidence level of the interval.
    """
    values = torch.as_tensor(differences, dtype=torch.float64)
    count = values.numel()
    if count < 2:
        raise UsageError(f"an interval needs at least 2 pairs, got {count}")
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"confidence must be between 0 and 1, got {confidence}")
    mean = float(values.mean())
    error = float(values.std(correction=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, 0.5 + confidence / 2.0)) * error
    return Interval(mean, mean - reach, mean + reach, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of a controller, seed by seed; tensors [N] on the CPU."""

    tasks: Sequence[str]
    seeds: Sequence[int]
    val_scores: Tensor
    """float64, final validation scores."""
    twin_val_scores: Tensor
    """float64, those of the twins."""
    test_scores: Tensor
    """float64, NaN if the test split was not used."""
    twin_test_scores: Tensor
    """float64, those of the twins."""
    returns: Tensor
    """float64, sums of raw rewards."""
    twin_returns: Tensor
    """float64, those of the twins."""
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
    flop_ratios: Tensor
    """float64, FLOPs per sample at the end over the host's."""
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


SELECT_SEEDS = 1 << 20
"""First of the seeds that choose the best policy of a run. Claims are measured on other seeds,
which start at 0."""


class Evaluator:
    """Plays the same new seeds with one controller after another; twins are played once.

    Args:
        config: tasks, episode length, reward and population.
        seeds: number of seeds of every task or family.
        first_seed: number of the first of them.
        touch_test: whether the test split is scored at the end.
        row_source: makes the populations; share one to share its data.
    """

    def __init__(
        self,
        config: TrainConfig,
        seeds: int = 20,
        *,
        first_seed: int = 0,
        touch_test: bool = True,
        row_source: TaskRows | None = None,
    ) -> None:
        """Look up the tasks."""
        self.config = config
        self._row_source = row_source or TaskRows(config)
        self._numbers = range(first_seed, first_seed + seeds)
        self._touch_test = touch_test
        self._twins: tuple[RoundOutcome, Tensor] | None = None

    def evaluate(self, controller: Policy | Controller | str, *, greedy: bool = True) -> Evaluation:
        """Play every seed once and compare it with its twin.

        Args:
            controller: a policy, a controller, or its name as on the command line.
            greedy: whether a policy takes its likeliest actions or samples.
        """
        if self._twins is None:
            # A waiting row is its own twin and gains nothing over it. Its curve is known only
            # afterwards, and no reward is paid for it.
            self._twins = self._play(WaitController(), None, greedy)
        waiting, twin_test = self._twins
        outcome, test = self._play(controller, waiting.states["val_score"], greedy)
        seeds, early = outcome.seeds, outcome.early_seeds
        return Evaluation(
            tasks=outcome.tasks,
            seeds=outcome.env_seeds,
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
            flop_ratios=1 + outcome.added_flops,
            op_counts=outcome.op_counts(),
        )

    def _play(
        self, controller: Policy | Controller | str, twins: Tensor | None, greedy: bool
    ) -> tuple[RoundOutcome, Tensor]:
        """Play all seeds; return the outcome, and the test scores [N], NaN if they are left out."""
        plan, population = self._row_source.evaluation(self._numbers)
        try:
            chosen = self._controller(controller, population, greedy)
            curves = torch.zeros(plan.rows, self.config.epochs) if twins is None else twins
            reward = make_reward(self.config.reward)
            outcome = play_episodes(population, chosen, reward, plan, curves)
            if self._touch_test:
                return outcome, population.test_scores()
            return outcome, torch.full((plan.rows,), torch.nan, dtype=torch.float64)
        finally:
            population.close()

    def _controller(
        self, controller: Policy | Controller | str, environment: Environment, greedy: bool
    ) -> Controller:
        context = ControllerContext(
            slot_names=SlotConfig.of(environment.num_slots).slot_ids,
            blueprint_names=self._row_source.blueprint_names,
            blueprint_kinds=self._row_source.blueprint_kinds,
            seed=self.config.seed,
        )
        if isinstance(controller, Policy):
            return LearnedController(controller, context, greedy=greedy)
        return make_controller(controller, context)
