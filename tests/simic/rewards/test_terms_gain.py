from __future__ import annotations

import math

import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.terms import committed_score, potential
from esper.testing import random_episode
from esper.utils.randomness import generator
from tests.simic.rewards.stories import Story, close, term


def test_basic_pays_the_change_of_the_score_in_the_step() -> None:
    story = Story(RewardConfig(mode="basic"))
    story.score = 54
    assert close(term(story.wait(), "gain"), 5 * 4 / 100)
    story.score = 51
    assert close(term(story.wait(), "gain"), -5 * 3 / 100)


def test_a_falling_loss_pays_and_a_rising_one_costs_half() -> None:
    """The sign: an improvement is a reward."""
    story = Story(RewardConfig(mode="loss"))
    story.score = 52  # the imagined loss falls by 0.02 per point
    assert close(term(story.wait(), "gain"), 5 * 0.04 / 0.05, 1e-4)
    story.score = 50
    assert close(term(story.wait(), "gain"), -5 * 0.5 * 0.04 / 0.05, 1e-4)


def test_a_jump_of_the_loss_is_bounded() -> None:
    story = Story(RewardConfig(mode="loss"))
    story.score = 90
    assert close(term(story.wait(), "gain"), 25)
    story.score = 10
    assert close(term(story.wait(), "gain"), -12.5)


SHAPED = RewardConfig(mode="shaped")


def with_fossils(config: RewardConfig, count: int, points: float = 2) -> Story:
    story = Story(config, slots=3, horizon=40)
    for slot in range(count):
        story.hold(slot)
        story.score += points
        story.contribution[:] = 1.5
        story.wait(2)
        story.fossilize(slot)
    return story


def test_terminal_is_paid_once_at_the_end() -> None:
    story = with_fossils(SHAPED, 2)
    assert story.sum("terminal") == 0
    assert close(term(story.finish(), "terminal"), 0.05 * 54 + 3 * math.tanh(2 / 3))


def test_a_fossil_without_improvement_is_not_counted() -> None:
    last = with_fossils(SHAPED, 2, points=0.9).finish()
    assert close(term(last, "terminal"), 0.05 * 51.8)


def test_a_fossil_of_the_last_step_counts() -> None:
    story = Story(SHAPED, horizon=10)
    story.hold()
    story.score, story.contribution[:] = 52, 1.5
    story.wait(2)
    step = story.fossilize()
    assert not story.active
    assert close(term(step, "terminal"), 0.05 * 52 + 3 * math.tanh(1 / 3))


def test_the_committed_score_is_that_without_the_undecided() -> None:
    """f(none) of two seeds: f(a) = 52, f(b) = 51, f(ab) = 54, f(none) = 50."""
    story = Story(SHAPED)
    story.hold(0)
    story.germinate(1)
    story.score = 54
    story.contribution[:] = torch.tensor([[54 - 51, 54 - 52]])
    story.interaction[0] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    story.blend(1)
    assert close(float(committed_score(story.signals)), 50)


def test_fossils_and_unmeasured_seeds_are_part_of_the_committed_score() -> None:
    story = Story(SHAPED)
    story.hold(0)
    story.score, story.contribution[:] = 54, 4.0
    story.wait()
    assert close(float(committed_score(story.signals)), 50)
    story.fossilize(0)
    story.germinate(1)
    assert close(float(committed_score(story.signals)), 54)


GAMMA = 0.9


@pytest.mark.parametrize("mode", ["shaped", "escrow", "simplified", "loss"])
@pytest.mark.parametrize("seed", range(2))
def test_the_discounted_sum_over_any_episode_is_zero(mode: str, seed: int) -> None:
    first, transitions = random_episode(16, 3, 30, generator(seed, "potentials"))
    reward = make_reward(RewardConfig(mode=mode, gamma=GAMMA))
    reward.reset(first)
    total = torch.zeros(16)
    largest = torch.zeros(16)
    for index, transition in enumerate(transitions):
        shaping = reward.step(transition).terms["pbrs"]
        total += GAMMA**index * shaping
        largest = torch.maximum(largest, shaping.abs())
    assert int((largest > 0.05).sum()) > 12, "it does shape, where anything was grown"
    assert torch.allclose(total, torch.zeros(16), atol=1e-5)


def test_potential_of_every_stage_and_its_epochs() -> None:
    story = Story(RewardConfig(mode="shaped"))
    assert float(potential(story.signals)) == 0
    story.germinate()
    assert close(float(potential(story.signals)), 1 + 0.3)
    story.advance()
    assert close(float(potential(story.signals)), 2 + 0.3)
    story.advance()
    story.wait(2)
    assert close(float(potential(story.signals)), 3.5 + 0.9)
    story.advance()
    assert close(float(potential(story.signals)), 5.5 + 0.3)
    story.fossilize()
    story.wait(20)
    assert close(float(potential(story.signals)), 6 + 2)


def test_slots_add_up_and_a_slot_that_cools_down_has_none() -> None:
    story = Story(RewardConfig(mode="shaped"))
    story.hold(0)
    story.germinate(1)
    assert float(potential(story.signals, 0.0)) == 5.5 + 1
    story.prune(0)
    assert float(potential(story.signals, 0.0)) == 1


def test_germination_has_no_bonus_beside_its_potential() -> None:
    story = Story(RewardConfig(mode="simplified"))
    step = story.germinate()
    assert close(term(step, "pbrs"), 0.3 * 0.995 * 1.3)
    assert close(float(step.total), 0.3 * 0.995 * 1.3 - 0.01)


def test_the_end_by_a_rollback_has_no_potential_either() -> None:
    story = Story(RewardConfig(mode="simplified", gamma=GAMMA))
    story.hold(0)
    story.fossilize(0)
    story.do(LifecycleOp.WAIT, rolled_back=True)
    assert close(story.sum("pbrs", gamma=GAMMA), 0.0)
