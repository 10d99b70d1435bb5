import math

import torch

from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def pair(together: float, score: float = 54, worth: float = 1.0) -> Story:
    story = Story(SHAPED)
    story.hold(0)
    story.germinate(1)
    story.contribution[:] = worth
    story.interaction[0] = torch.tensor([[0.0, together], [together, 0.0]])
    story.score = score
    story.blend(1)
    return story


def test_seeds_that_help_each_other_earn_a_bonus() -> None:
    assert close(term(pair(2.0).wait(), "synergy"), 0.1 * math.tanh(1.0))


def test_no_bonus_for_seeds_in_each_others_way_nor_for_harm_nor_after_a_loss() -> None:
    assert term(pair(-2.0).wait(), "synergy") == 0
    assert term(pair(2.0, worth=-1.0).wait(), "synergy") == 0
    assert term(pair(2.0, score=45).wait(), "synergy") == 0
