import torch

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import ShockConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def held(config: RewardConfig, size: int) -> Story:
    story = Story(config, slots=1, seed_params=torch.full((13,), size))
    story.hold()
    return story


def test_shock_is_the_squared_change_by_size() -> None:
    story = held(SHAPED, 5_000)
    assert term(story.wait(), "shock") == 0
    assert close(term(story.set_alpha(0), "shock"), -0.1958 * 0.25 * 0.5)


def test_the_seed_that_is_removed_still_counts_with_its_size() -> None:
    assert close(term(held(SHAPED, 5_000).prune(), "shock"), -0.1958 * 0.5)


def test_shock_has_a_limit_which_can_be_lifted() -> None:
    assert term(held(SHAPED, 10_000_000).prune(), "shock") == -1.0
    free = SHAPED.replace(shock=ShockConfig(limit=None))
    assert close(term(held(free, 10_000_000).prune(), "shock"), -195.8)
