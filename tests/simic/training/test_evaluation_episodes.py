from __future__ import annotations

import torch

from esper.simic.training.evaluation import play_episodes
from esper.tamiyo.controllers import WaitController, make_controller
from tests.simic.training.test_rollout import ROWS, STEPS, Scripted, StepCount, plan
from tests.tamiyo.controllers.scenes import CONTEXT


def test_a_waiting_controller_waits_to_the_end() -> None:
    outcome = play_episodes(Scripted(), WaitController(), StepCount(), plan())
    assert outcome.op_counts()["WAIT"] == ROWS * STEPS
    assert outcome.returns.tolist() == [21.0] * ROWS
    assert outcome.gain_mean is None


def test_rows_end_when_they_end() -> None:
    environment = Scripted(rollbacks={1: 3}, horizons=[4, 7, 7, 7])
    controller = make_controller("random", CONTEXT)
    outcome = play_episodes(environment, controller, StepCount(), plan())
    assert outcome.lengths.tolist() == [3, 2, 6, 6]
    assert outcome.rolled_back.tolist() == [False, True, False, False]
    assert all(int(taken["op"][1]) == 0 for taken in environment.taken[2:])


def test_the_twin_is_what_gains_are_taken_from() -> None:
    curves = torch.full((ROWS, STEPS + 1), 10.0)
    outcome = play_episodes(Scripted(), WaitController(), StepCount(), plan(), curves)
    assert torch.equal(outcome.gains, outcome.final_scores - 10.0)
