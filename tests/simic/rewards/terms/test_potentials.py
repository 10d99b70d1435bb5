import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.randomness import generator
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.config import PotentialConfig
from esper.simic.rewards.terms.potentials import potential
from esper.testing import random_episode
from tests.simic.rewards.stories import Story, close, term

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
    config = PotentialConfig()
    story = Story(RewardConfig(mode="shaped"))
    assert float(potential(story.signals, config)) == 0
    story.germinate()
    assert close(float(potential(story.signals, config)), 1 + 0.3)
    story.advance()
    assert close(float(potential(story.signals, config)), 2 + 0.3)
    story.advance()
    story.wait(2)
    assert close(float(potential(story.signals, config)), 3.5 + 0.9)
    story.advance()
    assert close(float(potential(story.signals, config)), 5.5 + 0.3)
    story.fossilize()
    story.wait(20)
    assert close(float(potential(story.signals, config)), 6 + 2)


def test_slots_add_up_and_a_slot_that_cools_down_has_none() -> None:
    config = PotentialConfig(progress_rate=0.0)
    story = Story(RewardConfig(mode="shaped"))
    story.hold(0)
    story.germinate(1)
    assert float(potential(story.signals, config)) == 5.5 + 1
    story.prune(0)
    assert float(potential(story.signals, config)) == 1


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
