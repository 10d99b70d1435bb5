"""One round on real networks, followed step by step: a seed germinates, blends and is fossilized.

Whatever crosses the border between the population and the controller is written down there; masks,
buffer, rewards and advantages are then worked out again from that record alone, by other means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import PopulationConfig
from esper.lab.population.population import Population
from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, Actions
from esper.leyline.rules import Masks, RulesConfig
from esper.leyline.signals import Signals
from esper.leyline.stages import ALPHA_TARGETS, AlphaMode
from esper.simic.agent.config import REWARD_CLIP, PPOConfig, RewardScales
from esper.simic.agent.objective import Targets, make_targets
from esper.simic.agent.rollout_buffer import RolloutBatch, TamiyoRolloutBuffer
from esper.simic.rewards import RewardConfig, Transition, make_reward
from esper.simic.training.config import TrainConfig
from esper.simic.training.episodes import TwinCurves
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.rollout import Rollout
from esper.simic.training.row_source import TaskRows
from esper.tamiyo.controllers.policy_file import Policy, new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.features import batch_obs_to_features
from tests.simic.rewards.reference import RowReference, row_of
from tests.simic.training.tiny import tiny_config

ROWS, STEPS = 4, 16
SCALE = 2.5
"""What the critic's numbers are multiplied by; not 1, so that forgetting it shows."""

WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = range(6)
EMPTY, GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED = -1, 2, 3, 4, 6, 7

CAUSAL = {
    WAIT: {"op"},
    GERMINATE: {"op", "slot", "blueprint", "style", "tempo", "alpha_target"},
    SET_ALPHA: {"op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"},
    PRUNE: {"op", "slot", "alpha_speed", "alpha_curve"},
    FOSSILIZE: {"op", "slot"},
    ADVANCE: {"op", "slot"},
}


class Watched:
    """A population, and everything that was seen of it and asked of it."""

    def __init__(self, population: Population) -> None:
        self.inner = population
        self.rows, self.num_slots = population.rows, population.num_slots
        self.device = population.device
        self.seen: list[Signals] = []
        self.asked: list[Actions] = []
        self.shown: list[Masks] = []

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        self.seen = [self.inner.reset(row_seeds)]
        return self.seen[0]

    def step(self, actions: Actions) -> Signals:
        self.asked.append({head: chosen.clone() for head, chosen in actions.items()})
        self.seen.append(self.inner.step(actions))
        return self.seen[-1]

    def masks(self) -> Masks:
        self.shown.append(self.inner.masks())
        return self.shown[-1]

    def panics(self) -> Tensor:
        return self.inner.panics()

    def snapshot(self) -> dict[str, Any]:
        return self.inner.snapshot()

    def restore(self, saved: dict[str, Any]) -> Signals:
        return self.inner.restore(saved)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Traced:
    """The round: what happened outside, and what the learner has of it."""

    config: TrainConfig
    policy: Policy
    watched: Watched
    twins: Tensor
    buffer: TamiyoRolloutBuffer
    outcome: RoundOutcome
    units: Tensor
    ppo: PPOConfig = field(default_factory=PPOConfig)

    @property
    def batch(self) -> RolloutBatch:
        return self.buffer.batch()

    @property
    def targets(self) -> Targets:
        return make_targets(
            self.buffer,
            self.ppo,
            scale=torch.tensor(SCALE),
            progress=0.0,
            paid_off=0.0,
            units=self.units,
        )

    def transition(self, step: int) -> Transition:
        before, after = self.watched.seen[step : step + 2]
        return Transition(
            before=before,
            actions=self.watched.asked[step],
            after=after,
            twin_before=self.twins[:, step],
            twin_after=self.twins[:, step + 1],
            is_last=torch.full((ROWS,), step == STEPS - 1),
            active=torch.ones(ROWS, dtype=torch.bool),
        )

    def life(self, row: int) -> tuple[int, list[int], list[int]]:
        """Return the slot of a row's first seed, its stages over all epochs, and all ops asked."""
        stages = torch.stack([signals.stage[row] for signals in self.watched.seen])
        slot = int((stages >= 0).any(0).nonzero()[0])
        return slot, stages[:, slot].tolist(), [int(a["op"][row]) for a in self.watched.asked]

    @property
    def fossil_rows(self) -> list[int]:
        return [row for row in range(ROWS) if self.life(row)[1][-1] == FOSSILIZED]


def eager_policy(config: PolicyConfig) -> Policy:
    """A policy that prefers moving a seed on to waiting, and the full amplitude soon."""
    policy = new_policy(config, seed=1)
    with torch.no_grad():
        policy.network.alpha_target_head[-1].bias[ALPHA_TARGETS.index(1.0)] += 6.0
        policy.network.tempo_head[-1].bias[0] += 4.0
    return policy


def play(mode: str) -> Traced:
    by_hand = LifecycleConfig(
        gates=GateConfig(min_training_epochs=2, min_gradient_health=0.0),
        rules=RulesConfig(max_seeds=1),
    )
    config = tiny_config(
        rows=ROWS,
        episode_length=STEPS,
        reward=RewardConfig(mode=mode),
        policy=PolicyConfig(
            num_slots=2, lstm_hidden_dim=8, initial_op_bias=(0.0, 2.0, -3.0, -4.0, 2.0, 2.0)
        ),
        population=PopulationConfig(lifecycle=by_hand),
    )
    row_source = TaskRows(config)
    plan = row_source.plan(0, 0)
    twins = TwinCurves(row_source, config)
    for _ in twins.prepare([plan]):
        pass
    curves = twins.scores(plan)
    policy = eager_policy(config.policy)
    watched = Watched(row_source.environment(0, 0))
    buffer = TamiyoRolloutBuffer(ROWS, STEPS, config.policy)
    rollout = Rollout(watched, policy, make_reward(config.reward), buffer, seed=config.seed)
    rollout.start(plan, curves)
    while not rollout.is_done:
        rollout.step()
    outcome = rollout.finish()
    row_source.close()
    scales = RewardScales()
    scales.update(plan.tasks, outcome.returns)
    return Traced(config, policy, watched, curves, buffer, outcome, scales.units(plan.tasks))


@pytest.fixture(scope="module", params=["twin", "shaped"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return play(request.param)


def allowed(stage: int, mode: int, age: int) -> set[int]:
    """The ops a host of at most one seed may be asked for, by the state of that seed."""
    rests = mode == int(AlphaMode.HOLD)
    old_enough = {PRUNE} if rests and age >= 1 else set()
    return {WAIT} | {
        EMPTY: {GERMINATE},
        GERMINATED: {ADVANCE} | old_enough,
        TRAINING: {ADVANCE} | old_enough,
        BLENDING: {ADVANCE} | old_enough | ({SET_ALPHA} if rests else set()),
        HOLDING: {FOSSILIZE} | old_enough | ({SET_ALPHA} if rests else set()),
        FOSSILIZED: set(),
    }.get(stage, set())


def test_a_seed_lives_from_germination_to_fossil(traced: Traced) -> None:
    assert traced.fossil_rows, "the policy is eager enough for this to happen"
    for row in traced.fossil_rows:
        slot, stages, ops = traced.life(row)
        passed = [stages[0]] + [after for before, after in pairwise(stages) if after != before]
        assert passed == [EMPTY, GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED]
        took = [bool(signals.last_success[row]) for signals in traced.watched.seen[1:]]
        for step, (before, after) in enumerate(pairwise(stages)):
            if after == before:
                continue
            mover = {GERMINATED: GERMINATE, FOSSILIZED: FOSSILIZE}.get(after, ADVANCE)
            assert ops[step] == mover
            assert took[step]
            assert int(traced.watched.asked[step]["slot"][row]) == slot
        alphas = [float(signals.alpha[row, slot]) for signals in traced.watched.seen]
        assert alphas == sorted(alphas)
        assert all(a == 0 for a, s in zip(alphas, stages, strict=True) if s <= TRAINING)
        assert any(0 < a < 1 for a, s in zip(alphas, stages, strict=True) if s == BLENDING)
        assert all(a == 1 for a, s in zip(alphas, stages, strict=True) if s >= HOLDING)


def test_a_gate_that_was_closed_makes_the_step_a_wait(traced: Traced) -> None:
    """An eager policy asks too early; what is learned from is what was asked, not what happened."""
    batch, refused = traced.batch, 0
    for step, (asked, after) in enumerate(
        zip(traced.watched.asked, traced.watched.seen[1:], strict=True)
    ):
        assert torch.equal(batch.op[:, step], asked["op"])
        effective = torch.where(after.last_success, asked["op"], WAIT)
        assert torch.equal(batch.effective_op[:, step], effective)
        refused += int((effective != asked["op"]).sum())
    assert refused > 0


def test_masks_allow_what_the_stage_allows_at_every_step(traced: Traced) -> None:
    batch = traced.batch
    op_head, slot_head = HEAD_NAMES.index("op"), HEAD_NAMES.index("slot")
    for step, (signals, masks) in enumerate(
        zip(traced.watched.seen, traced.watched.shown, strict=False)
    ):
        for row in range(ROWS):
            seeds = (signals.stage[row] >= 0).nonzero().flatten().tolist()
            slot = seeds[0] if seeds else 0
            state = [
                int(part[row, slot]) for part in (signals.stage, signals.alpha_mode, signals.age)
            ]
            legal = allowed(*state)
            shown = set(masks.op[row].nonzero().flatten().tolist())
            assert shown == legal, f"step {step}, row {row}, stage {state[0]}"
            # The buffer has the same mask, knows whether there was a choice, and kept to it.
            stored = batch.masks[row, step]
            assert set(stored[op_head].nonzero().flatten().tolist()) == legal
            assert bool(batch.free[row, step]) == (len(legal) > 1)
            actions = batch.actions[row, step]
            for index, head in enumerate(HEAD_NAMES):
                chosen = int(actions[index])
                if head in CAUSAL[int(actions[op_head])]:
                    assert bool(stored[index, chosen]), head
                else:
                    assert chosen == PLACEHOLDERS[head], head
            if int(actions[op_head]) not in (WAIT, GERMINATE):
                assert stored[slot_head].nonzero().flatten().tolist() == [slot]
    assert (~batch.free).any(), "a host with its fossil can only wait"


def test_every_step_in_the_buffer_is_the_step_that_was_lived(traced: Traced) -> None:
    batch, policy = traced.batch, traced.policy
    assert batch.valid.all()
    assert batch.terminated.tolist() == [[False] * (STEPS - 1) + [True]] * ROWS
    assert not batch.truncated.any()
    for step, (signals, asked) in enumerate(
        zip(traced.watched.seen, traced.watched.asked, strict=False)
    ):
        assert signals.epoch.tolist() == [step + 1] * ROWS
        raw, blueprints = batch_obs_to_features(signals, policy.slot_config, "cpu")
        assert torch.equal(batch.raw_states[:, step], raw)
        assert torch.equal(batch.states[:, step], policy.normalizer.normalize(raw))
        assert torch.equal(batch.blueprint_indices[:, step], blueprints)
        for index, head in enumerate(HEAD_NAMES):
            assert torch.equal(batch.actions[:, step, index], asked[head]), head


def test_memory_values_and_probabilities_belong_to_their_step(traced: Traced) -> None:
    """Scored one step at a time from the stored memory, and all at once from an empty one."""
    batch, network = traced.batch, traced.policy.network
    assert not batch.hidden_state[:, 0].any()
    assert not batch.hidden_cell[:, 0].any()
    whole = network.score(batch.states, batch.blueprint_indices, batch.actions, batch.masks)
    assert torch.allclose(whole.log_probs, batch.log_probs, atol=1e-4)
    assert torch.allclose(whole.baseline, batch.values, atol=1e-4)
    for step in range(STEPS):
        one = slice(step, step + 1)
        memory = (
            batch.hidden_state[:, step].transpose(0, 1).contiguous(),
            batch.hidden_cell[:, step].transpose(0, 1).contiguous(),
        )
        alone = network.score(
            batch.states[:, one],
            batch.blueprint_indices[:, one],
            batch.actions[:, one],
            batch.masks[:, one],
            memory,
        )
        assert torch.allclose(alone.log_probs, batch.log_probs[:, one], atol=1e-4)
        assert torch.allclose(alone.baseline, batch.values[:, one], atol=1e-4)
        for row in range(ROWS):
            causal = CAUSAL[int(batch.op[row, step])]
            idle = [index for index, head in enumerate(HEAD_NAMES) if head not in causal]
            assert not batch.log_probs[row, step, idle].any()


def test_every_term_is_what_plain_arithmetic_says(traced: Traced) -> None:
    names, terms = traced.outcome.term_names, traced.outcome.decisions["terms"]
    paid: set[str] = set()
    for row in range(ROWS):
        reference = RowReference(traced.config.reward)
        reference.reset(row_of(traced.watched.seen[0], row))
        for step in range(STEPS):
            expected = reference.step(traced.transition(step), row)
            got = dict(zip(names, terms[row, step].tolist(), strict=True))
            assert got == pytest.approx(expected, rel=2e-4, abs=2e-4), f"step {step}, row {row}"
            assert float(traced.outcome.decisions["reward"][row, step]) == pytest.approx(
                sum(got.values()), abs=1e-5
            )
            paid |= {name for name, value in expected.items() if value != 0}
    wanted = {
        "twin": {"gain", "rent"},
        "shaped": {"pbrs", "rent", "shock", "first_germination", "action", "terminal"},
    }
    assert paid >= wanted[traced.config.reward.mode]


def test_what_the_ops_of_the_story_pay(traced: Traced) -> None:
    """The terms a reader would expect at each station, without any reference."""
    reward, names = traced.config.reward, traced.outcome.term_names
    terms = traced.outcome.decisions["terms"]
    for row in traced.fossil_rows:
        _, stages, ops = traced.life(row)
        pays = [dict(zip(names, step, strict=True)) for step in terms[row].tolist()]
        born = next(step for step, stage in enumerate(stages[1:]) if stage == GERMINATED)
        kept = next(step for step, stage in enumerate(stages[1:]) if stage == FOSSILIZED)
        blends = next(step for step, stage in enumerate(stages[1:]) if stage == BLENDING)
        if reward.mode == "twin":
            scores = [float(signals.val_score[row]) for signals in traced.watched.seen]
            gains = [s - t for s, t in zip(scores, traced.twins[row].tolist(), strict=True)]
            assert gains[: born + 1] == [0.0] * (born + 1), "until it acts, a row is its twin"
            assert all(value == 0 for step in pays[:born] for value in step.values())
            for step in range(born, STEPS - 1):
                expected = reward.gamma * gains[step + 1] - (gains[step] if step > born else 0.0)
                assert pays[step]["gain"] == pytest.approx(expected, abs=1e-4)
                assert pays[step]["rent"] < 0
            assert pays[-1]["terminal"] == 0.0, "nothing was left undecided"
            last = reward.gamma * statistics.fmean(gains[-5:]) - gains[-2]
            assert pays[-1]["gain"] == pytest.approx(last, abs=1e-4)
        else:
            assert pays[born]["first_germination"] > 0
            assert (
                sum(step["first_germination"] for step in pays) == pays[born]["first_germination"]
            )
            assert all(step["rent"] == step["shock"] == 0 for step in pays[:blends])
            assert pays[blends]["rent"] < 0
            assert min(step["shock"] for step in pays[blends:kept]) < 0
            assert pays[-1]["terminal"] > 0
            phi = sum(reward.gamma**step * pay["pbrs"] for step, pay in enumerate(pays))
            assert phi == pytest.approx(0.0, abs=1e-4)
        assert FOSSILIZE not in ops[kept + 1 :]


def test_the_buffer_has_each_reward_once_and_its_unit_is_a_typical_return(traced: Traced) -> None:
    raw = traced.outcome.decisions["reward"]
    assert torch.equal(traced.batch.rewards, raw)
    returns = [sum(row) for row in raw.tolist()]
    assert traced.outcome.returns.tolist() == pytest.approx(returns, abs=1e-4)
    size = math.sqrt(statistics.fmean(each**2 for each in returns))
    assert float(traced.units[0]) == pytest.approx(size, rel=1e-4)


def test_advantages_are_those_of_a_loop_in_plain_numbers(traced: Traced) -> None:
    batch, ppo, targets = traced.batch, traced.ppo, traced.targets
    unit = float(traced.units[0])
    for row in range(ROWS):
        potentials = [0.0] * STEPS
        if traced.config.reward.mode == "twin":
            # What has been paid for: the gain over the twin, from the first deed on.
            acted = False
            for step in range(1, STEPS):
                acted = acted or int(batch.effective_op[row, step - 1]) != WAIT
                gain = traced.watched.seen[step].val_score[row] - traced.twins[row, step]
                potentials[step] = float(gain) if acted else 0.0
        assert batch.potentials[row].tolist() == pytest.approx(potentials, abs=1e-4)
        expected_values = [
            SCALE * float(value) - potential / unit
            for value, potential in zip(batch.values[row], potentials, strict=True)
        ]
        later, following, expected = 0.0, 0.0, [0.0] * STEPS
        for step in reversed(range(STEPS)):
            after = potentials[step + 1] if step + 1 < STEPS else 0.0
            change = (ppo.gamma * after - potentials[step]) / unit
            own = float(batch.rewards[row, step]) / unit - change
            reward = max(-REWARD_CLIP, min(REWARD_CLIP, own)) + change
            error = reward + ppo.gamma * following - expected_values[step]
            later = error + ppo.gamma * ppo.gae_lambda * later
            following = expected_values[step]
            expected[step] = later
        assert targets.raw_advantages[row].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_heads_learn_from_the_steps_they_decided(traced: Traced) -> None:
    batch, targets = traced.batch, traced.targets
    chosen = targets.raw_advantages[batch.free].tolist()
    mean, std = statistics.fmean(chosen), max(statistics.pstdev(chosen), 0.1)
    for row in range(ROWS):
        for step in range(STEPS):
            free = bool(batch.free[row, step])
            raw = float(targets.raw_advantages[row, step])
            expected = (raw - mean) / std if free else 0.0
            assert float(targets.advantages[row, step]) == pytest.approx(expected, abs=1e-3)
            heads = {
                head
                for head, counts in zip(HEAD_NAMES, targets.causal[row, step], strict=True)
                if counts
            }
            # What was asked for decides, even where a closed gate made it a WAIT.
            assert heads == (CAUSAL[int(batch.op[row, step])] if free else set())
