import math

import pytest
import torch

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import LossConfig
from tests.simic.rewards.stories import Story, close, term

LOSS = RewardConfig(mode="loss")


def test_a_young_seed_pays_no_rent() -> None:
    story = Story(LOSS, seed_params=torch.full((13,), 5_000))
    rents = [term(step, "rent") for step in (story.germinate(), story.wait(), story.wait())]
    assert rents == [0, 0, 0]
    assert close(term(story.wait(), "rent"), -0.05 * math.log1p(0.5))


def test_shaping_is_smaller_and_knows_no_progress() -> None:
    story = Story(LOSS)
    assert close(term(story.germinate(), "pbrs"), 0.1 * LOSS.gamma * 1.0)
    assert close(term(story.wait(), "pbrs"), 0.1 * (LOSS.gamma - 1))


@pytest.mark.parametrize(("score", "share"), [(0, 0.0), (50, 0.5), (100, 1.0), (140, 1.0)])
def test_the_end_pays_the_share_of_the_way_to_the_target(score: float, share: float) -> None:
    """The imagined loss is 2.3 at 0 points and 0.3 at 100."""
    story = Story(LOSS, horizon=4)
    story.score = score
    assert close(term(story.finish(), "terminal"), share, 1e-4)


def test_constants_of_another_task() -> None:
    text = LOSS.replace(loss=LossConfig(typical_change=0.15, baseline=10.8, target=3.5))
    story = Story(text)
    story.score = 53
    assert close(term(story.wait(), "gain"), 5 * 0.06 / 0.15, 1e-4)
