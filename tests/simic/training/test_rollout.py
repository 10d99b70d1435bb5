from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.problems.graded import GradedProblem
from esper.kasmina.signals import Panic
from esper.leyline.actions import Actions, LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards.contract import RewardStep, Transition
from esper.simic.training.rollout import Rollout
from esper.simic.training.row_source import RoundPlan
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig

ROWS, STEPS = 4, 6
CONFIG = PolicyConfig(lstm_hidden_dim=8, initial_op_bias=(0.0,) * 6)


class Scripted(GradedProblem):
    """The graded problem with rollbacks and horizons of the test's choosing."""

    def __init__(
        self, rollbacks: dict[int, int] | None = None, horizons: Sequence[int] = ()
    ) -> None:
        super().__init__(ROWS, steps=STEPS)
        self._rollbacks = rollbacks or {}
        self._horizons = torch.tensor(list(horizons) or [STEPS + 1] * ROWS)
        self.taken: list[Actions] = []

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        self.taken = []
        return self._changed(super().reset(row_seeds))

    def step(self, actions: Actions) -> Signals:
        self.taken.append(actions)
        return self._changed(super().step(actions))

    def restore(self, saved: dict[str, Any]) -> Signals:
        return self._changed(super().restore(saved))

    def panics(self) -> Tensor:
        return torch.where(self._last_back, int(Panic.DIVERGENCE), int(Panic.NONE))

    def _changed(self, signals: Signals) -> Signals:
        back = [int(signals.epoch[row]) == self._rollbacks.get(row) for row in range(ROWS)]
        self._last_back = torch.tensor(back)
        return replace(signals, max_epochs=self._horizons.clone(), rolled_back=self._last_back)


class StepCount:
    """Pays the number of the step, and remembers it."""

    needs_twin = False

    def __init__(self) -> None:
        self.seen: list[Transition] = []
        self.number = 0

    def reset(self, signals: Signals) -> None:
        self.number = 0

    def step(self, transition: Transition) -> RewardStep:
        self.seen.append(transition)
        self.number += 1
        return RewardStep(terms={"gain": torch.where(transition.active, float(self.number), 0.0)})

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Played:
    """A rollout with its parts at hand."""

    def __init__(self, environment: Scripted | None = None, **options: Any) -> None:
        self.environment = environment or Scripted()
        self.policy = new_policy(CONFIG, seed=1)
        self.reward = StepCount()
        self.buffer = TamiyoRolloutBuffer(ROWS, STEPS, CONFIG)
        self.rollout = Rollout(
            self.environment,
            self.policy,
            self.reward,
            self.buffer,
            **{"seed": 5, "recorded_rows": (0, 2), **options},
        )

    def start(self, number: int = 0) -> Played:
        self.rollout.start(plan(number))
        return self

    def finish(self) -> Played:
        while not self.rollout.is_done:
            self.rollout.step()
        return self


def plan(number: int = 0) -> RoundPlan:
    return RoundPlan(
        round=number,
        tasks=("graded",) * ROWS,
        env_seeds=tuple(range(ROWS)),
        slot_names={"graded": ("r0c0", "r0c1", "r0c2")},
    )


def same_tree(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tree(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_tree, one, other))
    return bool(one == other)


def test_a_round_fills_the_buffer_with_whole_episodes() -> None:
    played = Played().start().finish()
    batch = played.buffer.batch()
    assert batch.valid.all()
    assert batch.valid.shape == (ROWS, STEPS)
    assert batch.terminated.tolist() == [[False] * 5 + [True]] * ROWS
    assert not batch.truncated.any()
    outcome = played.rollout.finish()
    assert outcome.env_steps == played.rollout.decided == ROWS * STEPS
    assert outcome.returns.tolist() == [21.0] * ROWS


def test_the_buffer_holds_what_was_seen_before_the_decision() -> None:
    played = Played().start()
    before = played.rollout.episodes.signals
    played.rollout.step()
    played.finish()
    batch, taken = played.buffer.batch(), played.environment.taken
    assert torch.equal(batch.op[:, 0], taken[0]["op"])
    assert torch.equal(batch.op[:, 3], taken[3]["op"])
    # The clock is the first feature: decision t sees epoch t + 1.
    clock = batch.raw_states[:, :, 0] * (STEPS + 1)
    assert torch.allclose(clock, torch.arange(1.0, STEPS + 1).expand(ROWS, STEPS))
    assert before.epoch.tolist() == [1] * ROWS
    # The memory starts empty and is carried.
    assert not batch.hidden_state[:, 0].any()
    assert batch.hidden_state[:, 1].any()


def test_rewards_are_kept_as_they_were_paid() -> None:
    played = Played().start().finish()
    outcome = played.rollout.finish()
    assert torch.equal(outcome.decisions["reward"], played.buffer.batch().rewards)
    assert outcome.decisions["reward"][0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_same_state_is_scored_as_it_was_sampled() -> None:
    played = Played().start().finish()
    batch = played.buffer.batch()
    scores = played.policy.network.score(
        batch.states, batch.blueprint_indices, batch.actions, batch.masks
    )
    assert torch.allclose(scores.log_probs, batch.log_probs, atol=1e-4)
    assert torch.allclose(scores.baseline, batch.values, atol=1e-4)


def test_a_rollback_ends_its_row_and_nothing_else() -> None:
    played = Played(Scripted(rollbacks={1: 4})).start().finish()
    batch = played.buffer.batch()
    assert batch.valid.sum(1).tolist() == [6, 3, 6, 6]
    assert batch.terminated[1].tolist() == [False, False, True, False, False, False]
    assert not batch.rewards[1, 3:].any()
    # The row goes on waiting in its place.
    waits = [int(taken["op"][1]) for taken in played.environment.taken[3:]]
    assert waits == [int(LifecycleOp.WAIT)] * 3
    outcome = played.rollout.finish()
    assert outcome.lengths.tolist() == [6, 3, 6, 6]
    assert outcome.returns.tolist() == [21.0, 6.0, 21.0, 21.0]
    assert outcome.rolled_back.tolist() == [False, True, False, False]
    assert outcome.rollback_reasons == [None, "divergence", None, None]


def test_rows_end_at_their_own_horizons() -> None:
    played = Played(Scripted(horizons=[3, 7, 5, 7])).start().finish()
    assert played.buffer.batch().valid.sum(1).tolist() == [2, 6, 4, 6]
    assert played.rollout.finish().lengths.tolist() == [2, 6, 4, 6]


def test_a_round_ends_with_its_last_row() -> None:
    played = Played(Scripted(rollbacks=dict.fromkeys(range(ROWS), 3))).start().finish()
    assert played.rollout.step_count == 2
    assert played.buffer.cursor == 2


@pytest.mark.parametrize("critic", ["op_marginal", "op_sampled", "op_soft", "state"])
def test_a_bootstrapped_horizon_is_valued_with_the_carried_memory(critic: Any) -> None:
    played = Played(Scripted(horizons=[3, 7, 7, 7]), horizon="bootstrap")
    played.policy = new_policy(CONFIG.replace(critic=critic), seed=1)
    played.rollout = Rollout(
        played.environment,
        played.policy,
        played.reward,
        played.buffer,
        seed=5,
        horizon="bootstrap",
    )
    played.start().finish()
    batch = played.buffer.batch()
    assert not batch.terminated.any()
    assert batch.truncated.sum(1).tolist() == [1] * ROWS
    assert batch.truncated[0, 1]
    if critic == "op_sampled":
        assert played.buffer.bootstrap.abs().min() > 0
        return
    # The rollout's memory is the one after the last decision, and so is what it sees.
    _, state, blueprints = played.rollout._observe(played.rollout.episodes.signals)
    step = played.policy.network.get_action(
        state,
        played.environment.masks(),
        blueprint_indices=blueprints,
        hidden=played.rollout._hidden,
        uniforms=torch.zeros(ROWS, 8),
    )
    assert torch.allclose(played.buffer.bootstrap[1:], step.value[1:], atol=1e-4)
    # The row that was cut earlier was valued where it was cut, not at the end.
    assert not torch.allclose(played.buffer.bootstrap[0], step.value[0], atol=1e-6)


class StepPotential(StepCount):
    """Says also what has been paid for: another number for every row and step."""

    def step(self, transition: Transition) -> RewardStep:
        paid = super().step(transition)
        return replace(paid, potential=100.0 * torch.arange(ROWS) + self.number)


def test_every_cut_row_is_valued_after_its_own_last_step() -> None:
    # Two rows are cut in the same step, one before them, and one is rolled back in between.
    horizons = [6, 3, 7, 6]
    environment = Scripted(rollbacks={2: 4}, horizons=horizons)
    played = Played(environment)
    played.rollout = Rollout(
        environment,
        played.policy,
        StepPotential(),
        played.buffer,
        seed=5,
        horizon="bootstrap",
    )
    played.start()
    seen = [(played.rollout.episodes.signals, environment.masks())]
    while not played.rollout.is_done:
        played.rollout.step()
        seen.append((played.rollout.episodes.signals, environment.masks()))
    batch, network = played.buffer.batch(), played.policy.network
    lengths = [5, 2, 3, 5]
    assert batch.valid.sum(1).tolist() == lengths
    cuts = [(0, 4), (1, 1), (3, 4)]
    assert [tuple(end) for end in batch.truncated.nonzero().tolist()] == cuts
    assert batch.terminated.nonzero().tolist() == [[2, 2]]
    following, potentials = played.buffer.next_values(), played.buffer.next_potentials()
    for row, last in cuts:
        one = slice(row, row + 1)
        lived = (one, slice(0, last + 1))
        memory = network.score(
            batch.states[lived],
            batch.blueprint_indices[lived],
            batch.actions[lived],
            batch.masks[lived],
        ).hidden
        signals, masks = seen[last + 1]
        assert int(signals.epoch[row]) == horizons[row]
        _, state, blueprints = played.rollout._observe(signals)
        own = replace(masks, **{f.name: getattr(masks, f.name)[one] for f in fields(masks)})
        after = network.get_action(
            state[one], own, blueprints[one], memory, uniforms=torch.zeros(1, 8)
        )
        assert float(following[row, last]) == pytest.approx(float(after.value), abs=1e-4)
        assert float(potentials[row, last]) == 100.0 * row + last + 1
        assert batch.potentials[row, 1 : last + 1].tolist() == [
            100.0 * row + step for step in range(1, last + 1)
        ]
    assert float(following[2, 2]) == float(potentials[2, 2]) == 0.0


def test_a_rollback_at_the_horizon_is_no_cut() -> None:
    played = Played(Scripted(rollbacks={0: STEPS + 1}), horizon="bootstrap").start().finish()
    batch = played.buffer.batch()
    assert batch.terminated[0, -1]
    assert not batch.truncated[0].any()


def test_draws_depend_on_run_round_row_and_step() -> None:
    def ops(number: int = 0, **options: Any) -> Tensor:
        return Played(**options).start(number).finish().buffer.batch().actions

    assert torch.equal(ops(), ops())
    assert not torch.equal(ops(), ops(1))
    assert not torch.equal(ops(), ops(seed=6))


def test_a_second_round_starts_afresh() -> None:
    played = Played().start().finish()
    first = played.rollout.finish()
    again = played.start().finish().rollout.finish()
    assert same_tree(again.states, first.states)
    assert torch.equal(again.decisions["op"], first.decisions["op"])
    assert torch.equal(again.decisions["reward"], first.decisions["reward"])


@pytest.mark.parametrize("stop", range(STEPS))
def test_a_round_goes_on_from_any_step(stop: int) -> None:
    whole = Played(Scripted(rollbacks={3: 4})).start().finish()
    halted = Played(Scripted(rollbacks={3: 4})).start()
    for _ in range(stop):
        halted.rollout.step()
    state = halted.rollout.state_dict()
    halted.finish()
    other = Played(Scripted(rollbacks={3: 4}))
    other.rollout.load_state_dict(state)
    other.finish()
    assert same_tree(other.buffer.state_dict(), whole.buffer.state_dict())
    one, two = other.rollout.finish(), whole.rollout.finish()
    for name in ("decisions", "states", "recorded_decisions", "recorded_states"):
        assert same_tree(getattr(one, name), getattr(two, name)), name
    assert one.obs_clamp_share == two.obs_clamp_share


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: setattr(p.environment, "num_slots", 4), "set policy.num_slots to 4 or more"),
        (lambda p: setattr(p.reward, "needs_twin", True), "pass the twins' scores"),
        (lambda p: setattr(p.environment, "rows", 3), "for 4 rows, the environment has 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: Any, words: str) -> None:
    played = Played()
    change(played)
    with pytest.raises(UsageError, match=words):
        played.start()


def test_steps_out_of_turn_are_refused() -> None:
    played = Played()
    with pytest.raises(UsageError, match="start"):
        played.rollout.step()
    played.start()
    with pytest.raises(UsageError, match="still run"):
        played.rollout.finish()


def test_an_environment_that_never_ends_is_named() -> None:
    played = Played(Scripted(horizons=[99] * ROWS)).start()
    with pytest.raises(UsageError, match="horizon of episode_length \\+ 1"):
        played.finish()


def test_the_twin_is_read_at_the_same_epoch() -> None:
    played = Played()
    curves = torch.arange(STEPS + 1.0).expand(ROWS, -1).clone()
    played.rollout.start(plan(), curves)
    played.finish()
    seen = played.reward.seen
    assert [float(t.twin_before[0]) for t in seen] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [float(t.twin_after[0]) for t in seen] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [bool(t.is_last[0]) for t in seen] == [False] * 5 + [True]
    assert played.rollout.finish().twin_scores.tolist() == [6.0] * ROWS
