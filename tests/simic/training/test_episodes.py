from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.problems.graded import GradedProblem
from esper.leyline.actions import Actions, LifecycleOp, placeholder_actions
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.simic.rewards.contract import RewardStep, Transition
from esper.simic.training.episodes import Episodes
from esper.simic.training.row_source import RoundPlan

ROWS, STEPS = 3, 4


class OneForEach:
    """Pays every running row 1."""

    needs_twin = False

    def reset(self, signals: Signals) -> None:
        pass

    def step(self, transition: Transition) -> RewardStep:
        return RewardStep(terms={"one": transition.active.float()})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Uneven(GradedProblem):
    """Row 0 has half the horizon; what rows are asked to do is written down."""

    def __init__(self) -> None:
        super().__init__(ROWS, steps=STEPS)
        self.taken: list[Actions] = []

    def reset(self, row_seeds: Any = None) -> Signals:
        self.taken = []
        return self._shortened(super().reset(row_seeds))

    def step(self, actions: Actions) -> Signals:
        self.taken.append(actions)
        return self._shortened(super().step(actions))

    def restore(self, saved: dict[str, Any]) -> Signals:
        return self._shortened(super().restore(saved))

    def _shortened(self, signals: Signals) -> Signals:
        horizons = torch.tensor([STEPS // 2 + 1, *[STEPS + 1] * (ROWS - 1)])
        return dataclasses.replace(signals, max_epochs=horizons)


def plan(rows: int = ROWS) -> RoundPlan:
    return RoundPlan(round=0, tasks=("graded",) * rows, env_seeds=(1,) * rows, slot_names={})


def advance() -> dict[str, torch.Tensor]:
    actions = placeholder_actions(ROWS)
    return {**actions, "op": torch.full((ROWS,), int(LifecycleOp.ADVANCE))}


def test_a_row_that_has_ended_waits_and_is_paid_nothing() -> None:
    environment = Uneven()
    episodes = Episodes(environment, OneForEach())
    episodes.start(plan())
    paid = torch.zeros(ROWS)
    while bool(episodes.active.any()):
        _, step = episodes.step(advance())
        paid += step.total
    assert paid.tolist() == [STEPS / 2, STEPS, STEPS]
    wait, go = int(LifecycleOp.WAIT), int(LifecycleOp.ADVANCE)
    assert [int(actions["op"][0]) for actions in environment.taken] == [go, go, wait, wait]
    assert all(int(actions["op"][1]) == go for actions in environment.taken)


def test_episodes_go_on_from_their_state() -> None:
    first, second = Episodes(Uneven(), OneForEach()), Episodes(Uneven(), OneForEach())
    first.start(plan(), torch.rand(ROWS, STEPS + 1))
    for _ in range(2):
        first.step(advance())
    second.load_state_dict(first.state_dict())
    assert second.active.tolist() == [False, True, True]
    assert torch.equal(second.twin_scores, first.twin_scores)
    left, right = first.step(advance())[0], second.step(advance())[0]
    assert torch.equal(left.after.val_score, right.after.val_score)


def test_a_plan_for_other_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="the plan is for 2 rows, the environment has 3"):
        Episodes(Uneven(), OneForEach()).start(plan(2))
