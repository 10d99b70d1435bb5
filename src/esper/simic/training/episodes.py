"""Episodes: play one episode in every row, reward it, and train the twins it is compared with.

    episodes.start(plan, twins)
    while bool(episodes.active.any()):
        transition, paid = episodes.step(actions)

An episode ends at its horizon or when the governor rolls the row back. From then on the row only
waits, and its reward is 0. In `Rollout` a policy chooses the actions, in `esper.lab.envs` the
caller does. `TwinCurves` trains the twins: the same networks without growth.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.lab.population.population import Population
from esper.leyline.actions import Actions, TensorRecord, placeholder_actions
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.simic.rewards.contract import Reward, RewardStep, Transition
from esper.simic.training.config import TrainConfig
from esper.simic.training.row_source import Environment, RoundPlan, TaskRows, TaskShare
from esper.tamiyo.controllers import WaitController

# ---- TwinRegression: the score of a row without its seeds, with less noise than its own twin's


LEAST_OTHERS = 8
"""Fewest other twins of a task, each with its own seed, for the regression. With fewer, their
errors would be in the reward of every row (decision 0008)."""


@dataclass(frozen=True, slots=True)
class TwinRegression(TensorRecord):
    """Baseline scores for R rows, from the twins of K tasks over E epochs."""

    own_share: Tensor
    """float32 [K], weight of a row's own twin; with 1 only that twin counts."""
    means: Tensor
    """float32 [K, E], mean score of a task's twins."""
    persistence: Tensor
    """float32 [K, E, E], share of a twin's deviation from that mean at one epoch that is left at
    another."""
    task: Tensor
    """int64 [R], index of the task of every row."""

    @classmethod
    def fit(
        cls, own_share: float, curves: Mapping[str, Tensor], tasks: Sequence[str]
    ) -> TwinRegression:
        """Fit the regression for rows with these tasks.

        Args:
            own_share: weight of a row's own twin where at least `LEAST_OTHERS` others are known.
            curves: [twins, E] by task, one per seed; rows that share a seed share a twin.
            tasks: task of every row.
        """
        names = list(dict.fromkeys(tasks))
        shares, means, persistence = [], [], []
        for name in names:
            known = curves[name].double()
            shares.append(own_share if len(known) - 1 >= LEAST_OTHERS else 1.0)
            mean = known.mean(0)
            luck = known - mean
            shared = (luck.unsqueeze(2) * luck.unsqueeze(1)).sum(0)
            kept = shared / shared.diagonal().clamp(min=1e-9).unsqueeze(1)
            means.append(mean)
            persistence.append(kept.fill_diagonal_(1.0))
        return cls(
            torch.tensor(shares),
            torch.stack(means).float(),
            torch.stack(persistence).float(),
            torch.tensor([names.index(name) for name in tasks]),
        )

    def expect(self, own: Tensor, epoch: Tensor) -> Tensor:
        """Return float32 [R, E]: the expected scores of rows without their seeds.

        Args:
            own: [R, E], scores of the rows' own twins.
            epoch: int64 [R], last epoch at which a row was still identical to its twin.
        """
        luck, at = own - self.means[self.task], epoch - 1
        lasting = self.persistence[self.task, at] * luck.gather(1, at.unsqueeze(1))
        # Bit-equal to the own twin where its weight is 1.
        others_share = 1.0 - self.own_share[self.task].unsqueeze(1)
        return own + others_share * (lasting - luck)


class Episodes:
    """One episode in every row of an environment, resumable between any two steps.

    Args:
        environment: the rows; between rounds another one with as many rows may replace it.
        reward: computes the reward of a step.
    """

    def __init__(self, environment: Environment, reward: Reward) -> None:
        """Prepare; `start` builds the rows."""
        self.environment, self.reward = environment, reward
        self.rows, self.device = environment.rows, environment.device
        self.live_seconds = 0.0
        """Seconds spent in the environment since the start of the round."""
        self.reward_seconds = 0.0
        """Seconds spent computing rewards."""
        self._wait = placeholder_actions(self.rows, self.device)
        self.plan: RoundPlan
        """Tasks and seeds of the rows; set by `start`, as are the signals."""
        self.signals: Signals
        """The current signals."""
        self.active = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        """Bool [R], rows whose episode still runs."""
        self._has_parted = self.active.clone()
        """Bool [R], rows that differ from their twins by now."""
        self._twins = torch.zeros(0)
        self._expected = self._twins
        self._regression: TwinRegression | None = None

    @property
    def twin_scores(self) -> Tensor:
        """float32 [R], current scores of the twins, NaN without twins."""
        return twin_scores_at(self._twins, self.signals)

    def start(
        self,
        plan: RoundPlan,
        twins: Tensor | None = None,
        regression: TwinRegression | None = None,
    ) -> None:
        """Build every row anew and train its first epoch.

        Args:
            plan: tasks and seeds of the rows.
            twins: float32 [rows, epochs], the twin's score after each epoch; None without twins.
            regression: the baseline of rows that grow; by default their own twins.
        """
        if plan.rows != self.rows:
            raise UsageError(f"the plan is for {plan.rows} rows, the environment has {self.rows}")
        if twins is None and self.reward.needs_twin:
            raise UsageError("this reward is the gain over a twin; pass the twins' scores")
        self.plan = plan
        self._take_twins(twins)
        self._expected = self._twins.clone()
        self._regression = None if regression is None else regression.to(self.device)
        self._has_parted = torch.zeros_like(self._has_parted)
        self.active = torch.ones_like(self._has_parted)
        started = time.perf_counter()
        self.signals = self.environment.reset(plan.env_seeds)
        self.live_seconds, self.reward_seconds = time.perf_counter() - started, 0.0
        self.reward.reset(self.signals)

    def step(self, decided: Actions) -> tuple[Transition, RewardStep]:
        """Carry out one action per row, train an epoch, and return transition and reward.

        Args:
            decided: one action per row; it is ignored in rows whose episode has ended.
        """
        before, active = self.signals, self.active
        actions = {
            head: torch.where(active, decided[head], wait) for head, wait in self._wait.items()
        }
        started = time.perf_counter()
        # The rows train here, so gradients must be on.
        after = self.environment.step(actions)
        lived = time.perf_counter()
        with torch.no_grad():
            self._compare(before, after)
            transition = Transition(
                before=before,
                actions=actions,
                after=after,
                twin_before=twin_scores_at(self._expected, before),
                twin_after=twin_scores_at(self._expected, after),
                is_last=after.epoch >= after.max_epochs,
                active=active,
            )
            paid = self.reward.step(transition)
            self.signals = after
            self.active = active & ~transition.ended
        self.live_seconds += lived - started
        self.reward_seconds += time.perf_counter() - lived
        return transition, paid

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the episodes in progress as plain data and tensors."""
        regression = self._regression
        return {
            "plan": self.plan.to_mapping(),
            "twins": self._twins.cpu(),
            "expected": self._expected.cpu(),
            "regression": None if regression is None else regression.to("cpu").state_dict(),
            "has_parted": self._has_parted.cpu(),
            "environment": self.environment.snapshot(),
            "reward": self.reward.state_dict(),
            "active": self.active.cpu().clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; entries of others in the mapping are ignored."""
        self.plan = RoundPlan.from_mapping(state["plan"])
        self._take_twins(state["twins"])
        self._expected = state["expected"].to(self.device)
        saved = state["regression"]
        self._regression = None if saved is None else TwinRegression(**saved).to(self.device)
        self._has_parted = state["has_parted"].to(self.device)
        self.signals = self.environment.restore(state["environment"])
        self.reward.load_state_dict(state["reward"])
        self.active = state["active"].to(self.device)

    def _compare(self, before: Signals, after: Signals) -> None:
        """Fix the baseline of rows that start to differ from their twins in this step."""
        parts = after.has_effective_seed & ~self._has_parted
        self._has_parted |= parts
        if self._regression is not None:
            expected = self._regression.expect(self._twins, before.epoch)
            self._expected = torch.where(parts.unsqueeze(1), expected, self._expected)

    def _take_twins(self, twins: Tensor | None) -> None:
        if twins is None:
            twins = torch.full((self.rows, 1), torch.nan)
        self._twins = twins.to(self.device, torch.float32)


def twin_scores_at(curves: Tensor, signals: Signals) -> Tensor:
    """Return float32 [R]: the twins' scores at the epochs of the signals, from [R, epochs]."""
    last = curves.shape[1] - 1
    return curves.gather(1, (signals.epoch - 1).clamp(0, last).unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, slots=True)
class Moment:
    """Signals of R rows after an epoch, and the actions before it."""

    signals: Signals
    actions: Actions | None
    """{head: int64 [R]}, as carried out; None after the first epoch."""


class Actor(Protocol):
    """Chooses the actions of rows: every `Controller` does."""

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start an episode in every row."""

    def act(self, signals: Signals, masks: Masks) -> Actions:
        """Return one action per row."""


def live_episodes(
    environment: Environment, controller: Actor, row_seeds: Sequence[int] | None = None
) -> Iterator[Moment]:
    """Let a controller play one episode in every row; yield after every epoch.

    Args:
        environment: the rows.
        controller: chooses the actions.
        row_seeds: seed of every row; by default those the environment was made with.
    """
    device, rows = environment.device, environment.rows
    signals = environment.reset(row_seeds)
    controller.reset(rows, device)
    wait = placeholder_actions(rows, device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    yield Moment(signals, None)
    for _ in range(int((signals.max_epochs - signals.epoch).max())):
        masks = environment.masks().to(device)
        chosen = controller.act(signals, masks)
        actions = {head: torch.where(active, chosen[head].to(device), wait[head]) for head in wait}
        signals = environment.step(actions)
        yield Moment(signals, actions)
        active = active & ~(signals.rolled_back | (signals.epoch >= signals.max_epochs))


# ---- TwinCurves: the score of every row without growth, epoch by epoch


_REMEMBERED = 64
"""Number of twins of a task, the newest, that the task's mean is taken over."""

_POOL_MARGIN = 4096
"""Number of curves kept beyond those of the next rounds, where a pool of seeds draws them again."""


class TwinCurves:
    """Trains twins and keeps their scores, by task and environment seed.

    A twin is the same network with the same initial weights and data order; it depends on the task
    and the environment seed alone. Rows that share both share their twin. Twins of several rounds
    are trained together where that fills the device, and are kept until their rounds are over. A
    few small networks do not fill a device: `train_beside` trains the twins of the next rounds
    while the rows of this round train, an epoch in every step.

    Args:
        row_source: makes the populations.
        config: settings of the run.
    """

    def __init__(self, row_source: TaskRows, config: TrainConfig) -> None:
        """Start without any curve."""
        self._row_source, self._config = row_source, config
        self._curves: dict[str, Tensor] = {}
        self._by_task: dict[str, list[list[float]]] = {}
        self._ahead: Generator[tuple[int, int], None, None] | None = None
        """Trains the twins of the next rounds."""

    @property
    def rounds_ahead(self) -> int:
        """Number of rounds whose twins are trained together."""
        config = self._config
        if config.twin_rounds:
            return config.twin_rounds
        # On a CPU rows run one after another, and training them early only delays the first round.
        on_cuda = self._row_source.device.type == "cuda"
        return min(config.rows_per_seed, config.rows) if on_cuda else 1

    @property
    def fit_beside_rows(self) -> bool:
        """Whether twins train beside rows at little extra cost: on a GPU of this process."""
        return self._row_source.device.type == "cuda" and self._row_source.cluster is None

    def train_beside(
        self, environment: Environment, plans: Sequence[RoundPlan], stage: int = 0
    ) -> None:
        """Train the twins of the next rounds in the steps of this round; see `fit_beside_rows`.

        Args:
            environment: the rows of this round.
            plans: the next rounds, as `prepare` will be asked for them.
            stage: stage of the curriculum.
        """
        self.close()
        assert isinstance(environment, Population), "rows on a device of this process"
        if any(key not in self._curves for plan in plans[:1] for key in _keys(plan)):
            self._ahead = self._train(plans, stage)
        environment.meanwhile = self._advance

    def _advance(self) -> None:
        if self._ahead is not None:
            next(self._ahead, None)

    def close(self) -> None:
        """Drop twins that are not trained to the end."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def prepare(self, plans: Sequence[RoundPlan], stage: int = 0) -> Iterator[tuple[int, int]]:
        """Train the missing twins of these rounds, to their end; yield after each epoch.

        Yields:
            (epochs done, epochs to do). Twins that are not trained to the end are dropped.
        """
        if self._ahead is not None:
            yield from self._ahead
            self._ahead = None
        missing = [key for key in _keys(plans[0]) if key not in self._curves]
        self._forget({key: None for plan in plans for key in _keys(plan)})
        if missing:
            yield from self._train(plans, stage)

    def _train(
        self, plans: Sequence[RoundPlan], stage: int
    ) -> Generator[tuple[int, int], None, None]:
        """Train the missing twins of these rounds; yield after each epoch."""
        needed = {key: None for plan in plans for key in _keys(plan)}
        wanted = [key for key in needed if key not in self._curves]
        population, order = self._make(wanted, plans, stage)
        try:
            scores, ends = [], torch.ones(1, dtype=torch.int64)
            for moment in live_episodes(population, WaitController()):
                scores.append(moment.signals.val_score.cpu())
                ends = moment.signals.max_epochs.cpu()
                yield len(scores), int(ends.max())
        finally:
            population.close()
        curves = _hold(torch.stack(scores, dim=1), ends, self._config.epochs)
        self._curves |= {key: curves[row].clone() for row, key in enumerate(order)}
        for row, key in enumerate(order):
            known = self._by_task.setdefault(key.rpartition("#")[0], [])
            known.append(curves[row].tolist())
            del known[:-_REMEMBERED]

    def scores(self, plan: RoundPlan) -> Tensor:
        """Return float32 [rows, epochs]: the twin's score of every row after each epoch."""
        try:
            return torch.stack([self._curves[_key(*row)] for row in _rows(plan)])
        except KeyError as error:
            raise UsageError(f"the twin {error} is not trained yet; call prepare() first") from None

    def regression(self, plan: RoundPlan) -> TwinRegression:
        """Return the regression that gives rows of a round their baseline."""
        own_share = self._config.reward.twin.own_share
        known = {name: torch.tensor(self._by_task[name]) for name in set(plan.tasks)}
        return TwinRegression.fit(own_share, known, plan.tasks)

    def state_dict(self) -> dict[str, Any]:
        """Return all curves."""
        by_task = {name: torch.tensor(known) for name, known in self._by_task.items()}
        return {"curves": dict(self._curves), "by_task": by_task}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all curves by these."""
        self.close()
        self._curves = dict(state["curves"])
        self._by_task = {name: known.tolist() for name, known in state["by_task"].items()}

    def _make(
        self, wanted: Sequence[str], plans: Sequence[RoundPlan], stage: int
    ) -> tuple[Any, list[str]]:
        """Return a population of these twins, and the key of each of its rows."""
        found: dict[str, tuple[TaskShare, list[int]]] = {}
        for plan in plans:
            groups = {group.label: group for group in self._row_source.groups(plan.round, stage)}
            for label, seed in dict.fromkeys(_rows(plan)):
                if _key(label, seed) in wanted:
                    _, seeds = found.setdefault(label, (groups[label], []))
                    if seed not in seeds:
                        seeds.append(seed)
        parts = [
            TaskShare(group.task, label, len(seeds)) for label, (group, seeds) in found.items()
        ]
        seeds = [seed for _, own in found.values() for seed in own]
        order = [_key(label, seed) for label, (_, own) in found.items() for seed in own]
        return self._row_source.make(parts, seeds), order

    def _forget(self, needed: dict[str, None]) -> None:
        """Drop curves that the next rounds do not need; some are kept where seeds come again."""
        kept = _POOL_MARGIN if self._config.seed_pool else 0
        others = [key for key in self._curves if key not in needed]
        for key in others[: max(0, len(others) - kept)]:
            del self._curves[key]


def _hold(curves: Tensor, ends: Tensor, epochs: int) -> Tensor:
    """Return [N, epochs]: curves up to their rows' horizons, the last score repeated after that."""
    places = torch.arange(epochs).minimum(ends.unsqueeze(1) - 1)
    return curves.gather(1, places)


def _rows(plan: RoundPlan) -> list[tuple[str, int]]:
    return list(zip(plan.tasks, plan.env_seeds, strict=True))


def _keys(plan: RoundPlan) -> list[str]:
    return [_key(label, seed) for label, seed in dict.fromkeys(_rows(plan))]


def _key(label: str, seed: int) -> str:
    return f"{label}#{seed}"
