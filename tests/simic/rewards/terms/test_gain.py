from esper.simic.rewards import RewardConfig
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
