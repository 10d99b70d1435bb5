"""Episodes: all rows live side by side and are paid for what is done to them, whoever decides.

    episodes.start(plan, twins)
    while bool(episodes.active.any()):
        transition, paid = episodes.step(actions)

A row ends at its horizon or when the governor rolls it back; from then on it waits in its place and
is paid nothing. `Rollout` lets a policy decide; `esper.lab.envs` lets anybody.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import Actions, placeholder_actions
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.simic.rewards.contract import Reward, RewardStep, Transition
from esper.simic.training.row_source import Environment, RoundPlan

# ---- TwinRegression: what a row would have scored without its seeds, with less noise than its twin


LEAST_OTHERS = 8
"""Other twins of a task, each with a seed of its own, that it takes to know the task's mean and how
long luck lasts. With fewer, what is wrong with them is in the pay of all rows (decision 0079)."""


@dataclass(frozen=True, slots=True)
class TwinRegression:
    """The twins of K tasks over E epochs, for R rows."""

    own_share: Tensor
    """float32 [K], weight of a row's own twin; 1 is that twin alone."""
    means: Tensor
    """float32 [K, E], mean score of a task's twins."""
    persistence: Tensor
    """float32 [K, E, E], how much of a twin's distance from that mean at one epoch is left at
    another."""
    task: Tensor
    """int64 [R], task of every row."""

    @classmethod
    def fit(
        cls, own_share: float, curves: Mapping[str, Tensor], tasks: Sequence[str]
    ) -> TwinRegression:
        """Return the regression of rows with these tasks.

        Args:
            own_share: weight of a row's own twin where enough others are known.
            curves: [twins, E] by task, one for every seed; rows that share a seed share a twin.
            tasks: of all rows.
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

    def to(self, device: torch.device | str) -> TwinRegression:
        """Return the same on another device."""
        return TwinRegression(*(getattr(self, name).to(device) for name in _TENSORS))

    def expect(self, own: Tensor, epoch: Tensor) -> Tensor:
        """Return float32 [R, E]: the scores of rows without the seeds that take part in them.

        Args:
            own: [R, E], scores of the rows' own twins.
            epoch: int64 [R], epochs after which a row was still its twin.
        """
        luck, at = own - self.means[self.task], epoch - 1
        lasting = self.persistence[self.task, at] * luck.gather(1, at.unsqueeze(1))
        # Exactly the own twin where that is all that counts.
        others_share = 1.0 - self.own_share[self.task].unsqueeze(1)
        return own + others_share * (lasting - luck)

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors."""
        return {name: getattr(self, name).cpu() for name in _TENSORS}


_TENSORS = tuple(each.name for each in fields(TwinRegression))


class Episodes:
    """One episode in every row of an environment, resumable between any two steps.

    Args:
        environment: the rows; another with as many may take its place between rounds.
        reward: what a step pays.
    """

    def __init__(self, environment: Environment, reward: Reward) -> None:
        """Play nothing yet."""
        self.environment, self.reward = environment, reward
        self.rows, self.device = environment.rows, environment.device
        self.live_seconds = 0.0
        """Time that rows have spent living, since the start of the round."""
        self.reward_seconds = 0.0
        """Time that was spent on paying them."""
        self._wait = placeholder_actions(self.rows, self.device)
        self._plan: RoundPlan | None = None
        self._signals: Signals | None = None
        self.active = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        """Bool [R], rows whose episode still runs."""
        self._has_parted = self.active.clone()
        """Bool [R], rows that are no longer their twins."""
        self._twins = torch.zeros(0)
        self._expected = self._twins
        self._regression: TwinRegression | None = None

    @property
    def plan(self) -> RoundPlan:
        """What is being played."""
        assert self._plan is not None, "start() comes first"
        return self._plan

    @property
    def signals(self) -> Signals:
        """What is seen now."""
        assert self._signals is not None, "start() comes first"
        return self._signals

    @property
    def twin_scores(self) -> Tensor:
        """float32 [R], the waiting twins' scores now, NaN without twins."""
        return twin_scores_at(self._twins, self.signals)

    def start(
        self,
        plan: RoundPlan,
        twins: Tensor | None = None,
        regression: TwinRegression | None = None,
    ) -> None:
        """Build every row afresh and live its first epoch.

        Args:
            plan: the rows.
            twins: float32 [rows, epochs], the waiting twin's score after each epoch; None where
                no twin runs.
            regression: what rows that grow are compared with; their own twins alone by default.
        """
        if plan.rows != self.rows:
            raise UsageError(f"the plan is for {plan.rows} rows, the environment has {self.rows}")
        if twins is None and self.reward.needs_twin:
            raise UsageError("this reward is a gain over the waiting twin; give its scores")
        self._plan = plan
        self._take_twins(twins)
        self._expected = self._twins.clone()
        self._regression = None if regression is None else regression.to(self.device)
        self._has_parted = torch.zeros_like(self._has_parted)
        self.active = torch.ones_like(self._has_parted)
        started = time.perf_counter()
        self._signals = self.environment.reset(plan.env_seeds)
        self.live_seconds, self.reward_seconds = time.perf_counter() - started, 0.0
        self.reward.reset(self._signals)

    def step(self, decided: Actions) -> tuple[Transition, RewardStep]:
        """Let every row live one epoch, and return what became of it and what that paid.

        Args:
            decided: one action per row; rows whose episode has ended wait, whatever it is.
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
            self._signals = after
            self.active = active & ~transition.ended
        self.live_seconds += lived - started
        self.reward_seconds += time.perf_counter() - lived
        return transition, paid

    def state_dict(self) -> dict[str, Any]:
        """Return everything about the episodes in progress as plain data and tensors."""
        return {
            "plan": self.plan.to_mapping(),
            "twins": self._twins.cpu(),
            "expected": self._expected.cpu(),
            "regression": None if self._regression is None else self._regression.state_dict(),
            "has_parted": self._has_parted.cpu(),
            "environment": self.environment.snapshot(),
            "reward": self.reward.state_dict(),
            "active": self.active.cpu().clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the episodes that `state_dict` was taken of; other entries are left alone."""
        self._plan = RoundPlan.from_mapping(state["plan"])
        self._take_twins(state["twins"])
        self._expected = state["expected"].to(self.device)
        saved = state["regression"]
        self._regression = None if saved is None else TwinRegression(**saved).to(self.device)
        self._has_parted = state["has_parted"].to(self.device)
        self._signals = self.environment.restore(state["environment"])
        self.reward.load_state_dict(state["reward"])
        self.active = state["active"].to(self.device)

    def _compare(self, before: Signals, after: Signals) -> None:
        """Choose what rows that part from their twins are compared with from now on."""
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
    """Return float32 [R]: the twins' scores after as many epochs, of curves [R, epochs]."""
    last = curves.shape[1] - 1
    return curves.gather(1, (signals.epoch - 1).clamp(0, last).unsqueeze(1)).squeeze(1)
