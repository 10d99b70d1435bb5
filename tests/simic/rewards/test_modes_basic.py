import torch

from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

BASIC = RewardConfig(mode="basic")


def test_the_sum_of_gains_is_the_change_over_the_episode() -> None:
    story = Story(BASIC, horizon=12)
    for points in (3, -5, 10, 1):
        story.score += points
        story.wait()
    story.finish()
    assert close(story.sum("gain"), 5 * 9 / 100)


def test_parameters_in_use_cost_their_share_of_the_budget() -> None:
    story = Story(BASIC, seed_params=torch.full((13,), 50_000))
    story.hold()
    assert close(term(story.wait(), "rent"), -0.1 * (39 + 50_000) / 500_000)


def test_planting_and_pruning_never_pays() -> None:
    story = Story(BASIC, slots=1)
    for _ in range(2):
        story.germinate()
        story.blend()
        story.prune()
        story.wait(8)
    assert story.sum() < 0
