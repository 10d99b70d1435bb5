from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.signals import Signals
from esper.simic.agent.report import ClampCounter
from esper.simic.rewards.contract import RewardStep, Transition
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.traces import KEPT_STATES, RoundTraces, Trace
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.policy.features import batch_obs_to_features
from tests.simic.training.test_rollout import (
    CONFIG,
    ROWS,
    STEPS,
    Played,
    Scripted,
    plan,
    same_tree,
)

POTENTIAL = torch.arange(float(ROWS))
SCALE = 2.5

CALM = torch.zeros(ROWS, dtype=torch.int64)


class Keeping:
    """Traces that are filled by hand, and what was put into them."""

    def __init__(self, recorded_rows: Sequence[int] = (0, 2), *, has_details: bool = True) -> None:
        self.policy = new_policy(CONFIG, seed=1)
        self.environment = Scripted()
        self.traces = RoundTraces(ROWS, STEPS, recorded_rows, "cpu")
        self.has_details = has_details
        self.values: list[Tensor] = []
        self.op_values: list[Tensor] = []
        self.signals = self.environment.reset()
        self.traces.keep_state(self.signals, self.twin_scores(self.signals), CALM)

    def twin_scores(self, signals: Signals) -> Tensor:
        return 10.0 * signals.epoch + torch.arange(ROWS)

    @torch.no_grad()
    def step(self) -> None:
        raw, blueprints = batch_obs_to_features(self.signals, self.policy.slot_config, "cpu")
        decided = self.policy.network.get_action(
            raw, self.environment.masks(), blueprints, uniforms=torch.full((ROWS, 8), 0.7)
        )
        before, self.signals = self.signals, self.environment.step(dict(decided.items()))
        transition = Transition(
            before=before,
            actions=dict(decided.items()),
            after=self.signals,
            twin_before=self.twin_scores(before),
            twin_after=self.twin_scores(self.signals),
            is_last=self.signals.epoch >= self.signals.max_epochs,
            active=torch.ones(ROWS, dtype=torch.bool),
        )
        details = {"why": torch.full((ROWS,), 3)} if self.has_details else {}
        paid = RewardStep(terms={"gain": torch.ones(ROWS), "rent": -POTENTIAL}, details=details)
        self.traces.keep_decision(
            transition,
            decided,
            paid,
            free=torch.tensor([True, False] * (ROWS // 2)),
            potential=POTENTIAL,
            value_scale=torch.full((ROWS,), SCALE),
        )
        self.traces.keep_state(self.signals, transition.twin_after, CALM)
        self.values.append(decided.value)
        self.op_values.append(decided.op_values[torch.arange(ROWS), decided.op])

    def outcome(self) -> RoundOutcome:
        return self.traces.outcome(plan(3), ClampCounter(self.policy.layout, "cpu"))


def kept(outcome: RoundOutcome) -> list[Any]:
    return [
        *(dict(outcome.decisions), dict(outcome.states)),
        *(dict(outcome.recorded_decisions), dict(outcome.recorded_states)),
        *(tuple(outcome.term_names), tuple(outcome.detail_names)),
    ]


def test_states_are_there_before_the_first_decision_and_after_each() -> None:
    keeping = Keeping()
    for _ in range(2):
        keeping.step()
    outcome = keeping.outcome()
    assert keeping.traces.length == 2
    assert (outcome.round, outcome.env_seeds) == (3, plan().env_seeds)
    assert outcome.decisions["op"].shape == (ROWS, 2)
    assert outcome.states.keys() == {*KEPT_STATES, "twin_score", "panic"}
    assert outcome.states["twin_score"][1].tolist() == [11.0, 21.0, 31.0]
    assert outcome.recorded_states["epoch"].tolist() == [[1, 2, 3]] * 2


def test_a_decision_has_its_reward_by_terms() -> None:
    keeping = Keeping()
    keeping.step()
    outcome = keeping.outcome()
    assert outcome.term_names == ("gain", "rent")
    assert outcome.decisions["terms"][2, 0].tolist() == [1.0, -2.0]
    assert outcome.decisions["reward"][:, 0].tolist() == [1.0, 0.0, -1.0, -2.0]
    assert outcome.decisions["free"][:, 0].tolist() == [True, False, True, False]


def test_recorded_values_are_raw_and_what_is_paid_already_stands_beside_them() -> None:
    keeping = Keeping((3, 1))
    for _ in range(2):
        keeping.step()
    recorded = keeping.outcome().recorded_decisions
    rows = [3, 1]
    values, taken = torch.stack(keeping.values, 1), torch.stack(keeping.op_values, 1)
    assert torch.allclose(recorded["value"], SCALE * values[rows])
    assert torch.allclose(recorded["q_taken"], SCALE * taken[rows])
    assert torch.equal(recorded["potential"], POTENTIAL[rows, None].expand(2, 2))


def test_recorded_rows_are_the_rows_themselves() -> None:
    outcome = Played().start().finish().rollout.finish()
    assert torch.equal(outcome.recorded_states["val_score"], outcome.states["val_score"][[0, 2]])
    assert torch.equal(
        outcome.recorded_decisions["actions"][..., -1], outcome.decisions["op"][[0, 2]]
    )


def test_nothing_is_recorded_where_no_row_is() -> None:
    keeping = Keeping(())
    keeping.step()
    outcome = keeping.outcome()
    assert outcome.recorded_decisions == outcome.recorded_states == {}
    assert outcome.decisions["op"].shape == (ROWS, 1)


def test_details_are_kept_where_the_reward_has_any() -> None:
    keeping, without = Keeping(), Keeping(has_details=False)
    for each in (keeping, without):
        each.step()
    assert keeping.outcome().detail_names == ("why",)
    assert keeping.outcome().decisions["details"].tolist() == [[[3.0]]] * ROWS
    assert without.outcome().detail_names == ()
    assert "details" not in without.outcome().decisions


def test_terms_that_come_and_go_within_a_round_are_refused() -> None:
    keeping = Keeping()
    keeping.step()
    keeping.has_details = False
    with pytest.raises(UsageError, match=r"the same terms and details in every step.*: why"):
        keeping.step()
    # Another round may have others.
    keeping.traces.start()
    keeping.step()
    assert keeping.outcome().detail_names == ()


def test_a_new_round_starts_empty() -> None:
    keeping = Keeping()
    keeping.step()
    keeping.traces.start()
    assert keeping.traces.length == 0
    assert keeping.outcome().states["val_score"].shape == (ROWS, 0)


def test_traces_go_on_from_their_state() -> None:
    whole, other = Keeping(), Keeping()
    for each in (whole, other):
        each.step()
    # What a whole round saves has more in it.
    state = {**other.traces.state_dict(), "is_done": False}
    other.traces = RoundTraces(ROWS, STEPS, (0, 2), "cpu")
    other.traces.load_state_dict(state)
    assert same_tree(kept(other.outcome()), kept(whole.outcome()))
    for each in (whole, other):
        each.step()
    assert same_tree(kept(other.outcome()), kept(whole.outcome()))


def test_what_is_put_comes_back_by_row_and_step() -> None:
    trace = Trace(2, 3)
    for step in range(2):
        trace.put(
            step, {"a": torch.tensor([step, 10 + step]), "b": torch.full((2, 4), float(step))}
        )
    found = trace.read()
    assert found["a"].tolist() == [[0, 1], [10, 11]]
    assert found["b"].shape == (2, 2, 4)
    assert found["b"][:, 1].eq(1.0).all()


def test_a_new_round_starts_empty_and_may_have_another_shape() -> None:
    trace = Trace(1, 2)
    trace.put(0, {"stage": torch.ones(1, 3)})
    trace.start()
    assert trace.length == 0
    trace.put(0, {"stage": torch.zeros(1, 2)})
    assert trace.read()["stage"].shape == (1, 1, 2)


def test_what_was_read_does_not_change_afterwards() -> None:
    trace = Trace(1, 2)
    trace.put(0, {"a": torch.ones(1)})
    before = trace.read()["a"]
    trace.start()
    assert before.tolist() == [[1.0]]


def test_a_step_beyond_the_end_is_refused() -> None:
    with pytest.raises(UsageError, match="a trace of 2 steps has no step 2"):
        Trace(1, 2).put(2, {"a": torch.ones(1)})


def test_a_trace_goes_on_from_its_state() -> None:
    trace, other = Trace(2, 3), Trace(2, 3)
    trace.put(0, {"a": torch.tensor([1.0, 2.0])})
    other.load_state_dict(trace.state_dict())
    for each in (trace, other):
        each.put(1, {"a": torch.tensor([3.0, 4.0])})
    assert other.length == 2
    assert torch.equal(trace.read()["a"], other.read()["a"])


@pytest.mark.parametrize(("rows", "steps", "words"), [(1, 3, "2 rows"), (2, 1, "2 steps")])
def test_a_state_of_another_shape_is_refused(rows: int, steps: int, words: str) -> None:
    trace = Trace(2, 3)
    trace.put(1, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=words):
        Trace(rows, steps).load_state_dict(trace.state_dict())
