"""Trainer: rounds of episodes and PPO updates, resumable at any step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from esper.lab.population.ray_population import RayCluster
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import CheckpointError, UsageError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards import Reward, make_reward
from esper.simic.training.config import TrainConfig
from esper.simic.training.episodes import TwinCurves
from esper.simic.training.evaluation import SELECT_SEEDS, Evaluation, Evaluator
from esper.simic.training.progress import Phase, Progress, RoundReport, Tally
from esper.simic.training.rollout import Rollout
from esper.simic.training.row_source import (
    Curriculum,
    Environment,
    GivenRows,
    RoundPlan,
    RowSource,
    TaskRows,
)
from esper.tamiyo.controllers.policy_file import load_policy, new_policy


class Trainer:
    """Trains one policy.

    Args:
        config: settings of the run.
        environment: rows to train on; by default populations on the configuration's tasks.
        reward: computes rewards; by default the configuration's mode.
        is_continued: whether a state will be loaded, so that `config.start` is not read.
        cluster: Ray cluster that holds the rows; by default this process does.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        environment: Environment | None = None,
        reward: Reward | None = None,
        is_continued: bool = False,
        cluster: RayCluster | None = None,
    ) -> None:
        """Build policy and learner; rows are built by the first round."""
        self.config = config
        self.cluster = cluster
        self.row_source: RowSource
        if environment is None:
            self.row_source = TaskRows(config, cluster)
            rows = config.rows
        else:
            self.row_source = GivenRows(environment, config)
            rows = environment.rows
        self.device = self.row_source.device
        self.reward = make_reward(config.reward) if reward is None else reward
        names = self.row_source.blueprint_names
        # Registered blueprints are choices too, beyond those the configuration counted.
        network = config.policy.fitted(self.row_source.num_slots, len(names))
        self.policy = new_policy(
            network,
            blueprint_names=names,
            blueprint_kinds=self.row_source.blueprint_kinds,
            seed=config.seed,
        ).to(self.device)
        self.agent = PPOAgent(self.policy, config.ppo, self.device, config.seed)
        if config.start is not None and not is_continued:
            self.agent.start_from(load_policy(config.start))
        self.buffer = TamiyoRolloutBuffer(rows, config.episode_length, network, self.device)
        self.twins: TwinCurves | None = None
        if self.reward.needs_twin and isinstance(self.row_source, TaskRows):
            self.twins = TwinCurves(self.row_source, config)
        self.round = 0
        """Round in progress, or next."""
        self.tally = Tally(config.ppo.exploration.patience, self.policy.blueprint_names)
        """Totals and averages of the finished rounds."""
        self.curriculum = Curriculum(config.stages)
        """Stage of the round in progress, or next."""
        self._rollout: Rollout | None = None
        self._in_round = False
        self._twin_seconds = 0.0
        self._evaluator: Evaluator | None = None

    @property
    def is_done(self) -> bool:
        """Whether all rounds are played."""
        return self.round >= self.config.rounds

    @property
    def step(self) -> int:
        """Decisions of a row so far in the round in progress."""
        return self._rollout.step_count if self._in_round and self._rollout is not None else 0

    # ------------------------------------------------------------------------------------- rounds

    def run(self, rounds: int | None = None) -> Iterator[RoundReport]:
        """Train all rounds, or this many; yield the report of every finished round."""
        reports = (progress.report for progress in self.train())
        return islice((report for report in reports if report is not None), rounds)

    def train(self) -> Iterator[Progress]:
        """Train all rounds; yield after every step. `state_dict` may be called in between."""
        while not self.is_done:
            if not self._in_round:
                yield from self._open_round()
            assert self._rollout is not None
            while not self._rollout.is_done:
                yield self._step(self._rollout)
            yield self._close_round(self._rollout)

    def close(self) -> None:
        """Free the processes and the memory of the rows."""
        if self.twins is not None:
            self.twins.close()
        self.row_source.close()

    def _open_round(self) -> Iterator[Progress]:
        """Plan the rows, train missing twins, and train every row's first epoch."""
        stage = self.curriculum.stage
        plan = self.row_source.plan(self.round, stage)
        curves = regression = None
        if self.twins is not None:
            self._twin_seconds = 0.0
            started = time.perf_counter()
            for step, steps in self.twins.prepare(self._next_plans(self.twins), stage):
                now = time.perf_counter()
                self._twin_seconds += now - started
                yield self._progress("twins", step, steps, now - started)
                started = time.perf_counter()
            curves, regression = self.twins.scores(plan), self.twins.regression(plan)
        rollout = self._make_rollout()
        if self.twins is not None and self.twins.fit_beside_rows:
            later = self._next_plans(self.twins, 1)
            self.twins.train_beside(rollout.episodes.environment, later, stage)
        rollout.start(
            plan,
            curves,
            regression=regression,
            value_scale=self.agent.value_units(plan.tasks),
        )
        self._in_round = True

    def _step(self, rollout: Rollout) -> Progress:
        started = time.perf_counter()
        episodes = rollout.episodes
        active = episodes.active
        ops = rollout.step()
        val_score, running = episodes.signals.val_score, int(active.sum())
        gains = ((val_score - episodes.twin_scores) * active).sum() / running
        scores = (val_score * active).sum() / running
        # One copy to the host for both.
        score, gain = torch.stack([scores, gains]).tolist()
        return self._progress(
            "rollout",
            rollout.step_count,
            rollout.steps,
            time.perf_counter() - started,
            active=int(episodes.active.sum()),
            env_steps=self.tally.env_steps + rollout.decided,
            score_mean=score,
            gain_mean=None if math.isnan(gain) else gain,
            op_counts=count_ops(ops, active),
        )

    def _close_round(self, rollout: Rollout) -> Progress:
        """Update the policy by the finished round, and report it."""
        outcome = rollout.finish()
        self.tally.add(outcome)
        started = time.perf_counter()
        batch = self.buffer.batch()
        self.policy.normalizer.update(batch.raw_states[batch.valid])
        update = self.agent.update(
            self.buffer,
            progress=self.round / self.config.rounds,
            paid_off=self.tally.settled(outcome.tasks),
            round=self.round,
            tasks=outcome.tasks,
            # The penalty of a rollback says nothing about the scale of rewards.
            counts=~outcome.rolled_back,
        )
        units = self.agent.reward_scales.units(outcome.tasks)
        outcome = dataclasses.replace(outcome, reward_units=units)
        updated = time.perf_counter() - started
        started = time.perf_counter()
        evaluation = self._evaluate()
        evaluated = time.perf_counter() - started
        report = RoundReport(
            round=self.round,
            env_steps=self.tally.env_steps,
            outcome=outcome,
            update=update,
            paid_off=self.tally.paid_off,
            score_rolling=self.tally.score_rolling,
            merit_rolling=self.tally.merit_rolling,
            is_best=self.tally.judge(None if evaluation is None else self._merit(evaluation)),
            stage=self.curriculum.stage,
            timings={
                "twins": self._twin_seconds,
                **rollout.timings,
                "update": updated,
                "evaluation": evaluated,
            },
            evaluation=evaluation,
        )
        self.round += 1
        self._in_round = False
        self._twin_seconds = 0.0
        self.curriculum.add_round(self.tally.paid_off)
        return self._progress("update", 1, 1, updated, report=report, round=report.round)

    def _evaluate(self) -> Evaluation | None:
        """Play greedy episodes on the selection seeds, where they are due."""
        every, done = self.config.evaluate_every, self.round + 1
        if not every or (done % every and done < self.config.rounds):
            return None
        if not isinstance(self.row_source, TaskRows):
            raise UsageError(
                "evaluate_every needs tasks; with an environment of your own, set it to 0"
            )
        if self._evaluator is None:
            self._evaluator = Evaluator(
                self.config,
                self.config.evaluation_seeds,
                first_seed=SELECT_SEEDS,
                touch_test=False,
                row_source=self.row_source,
            )
        return self._evaluator.evaluate(self.policy)

    def _merit(self, evaluation: Evaluation) -> float:
        """Return the mean return in units of each task, so that no task dominates."""
        units = self.agent.reward_scales.units(evaluation.tasks)
        return float((evaluation.returns / units).mean())

    def _next_plans(self, twins: TwinCurves, first: int = 0) -> list[RoundPlan]:
        """Return the plans of the next rounds, from `first` rounds after this one."""
        known = self.curriculum.known_rounds(self.config.rounds - self.round)
        last, stage = min(known, first + twins.rounds_ahead), self.curriculum.stage
        return [self.row_source.plan(self.round + number, stage) for number in range(first, last)]

    def _make_rollout(self) -> Rollout:
        """Return the rollout, on the environment of the round."""
        environment = self.row_source.environment(self.round, self.curriculum.stage)
        if self._rollout is None:
            rows = self.buffer.rows
            recorded = min(self.config.recorded_rows, rows)
            self._rollout = Rollout(
                environment,
                self.policy,
                self.reward,
                self.buffer,
                seed=self.config.seed,
                horizon=self.config.horizon,
                # Spread over the rows, so that several tasks and seeds are among them.
                recorded_rows=[number * rows // recorded for number in range(recorded)],
            )
        self._rollout.episodes.environment = environment
        return self._rollout

    def _progress(
        self, phase: Phase, step: int, steps: int, seconds: float, **values: Any
    ) -> Progress:
        known = {"round": self.round, "env_steps": self.tally.env_steps, "active": 0}
        return Progress(
            phase=phase,
            rounds=self.config.rounds,
            step=step,
            steps=steps,
            seconds=seconds,
            **{**known, **values},
        )

    # -------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data and tensors; training continues exactly from it."""
        rollout = None
        if self._in_round:
            assert self._rollout is not None
            rollout = self._rollout.state_dict()
        return {
            "config": self.config.to_mapping(),
            "blueprints": list(self.policy.blueprint_names),
            "round": self.round,
            **self.tally.state_dict(),
            **self.curriculum.state_dict(),
            "agent": self.agent.state_dict(),
            "twins": None if self.twins is None else self.twins.state_dict(),
            "twin_seconds": self._twin_seconds,
            "rollout": rollout,
        }

    def load_state_dict(self, state: dict[str, Any], *, restart_round: bool = False) -> None:
        """Continue from `state_dict`, in a trainer with the same settings.

        Args:
            state: the state.
            restart_round: start a round that was in progress again from its beginning.
        """
        self._refuse_other_blueprints(state["blueprints"])
        self.agent.load_state_dict(state["agent"])
        if self.twins is not None and state["twins"] is not None and not restart_round:
            self.twins.load_state_dict(state["twins"])
        self.round = int(state["round"])
        self.tally.load_state_dict(state)
        self.curriculum.load_state_dict(state)
        self._twin_seconds = float(state["twin_seconds"])
        rollout = state["rollout"]
        self._in_round = rollout is not None and not restart_round
        if self._in_round:
            self._make_rollout().load_state_dict(rollout)

    def _refuse_other_blueprints(self, saved: list[str]) -> None:
        own = self.policy.blueprint_names
        if tuple(saved) != own:
            other = sorted(set(saved) ^ set(own)) or ["their order"]
            raise CheckpointError(
                f"the run was started with other blueprints ({', '.join(other)}); register the "
                "same ones in the same order before you continue it"
            )


def count_ops(ops: Tensor, active: Tensor) -> dict[str, int]:
    """Return how often every op was chosen in the active rows."""
    counts = torch.bincount(ops[active], minlength=len(LifecycleOp)).tolist()
    return {op.name: counts[op] for op in LifecycleOp}
