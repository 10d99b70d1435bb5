import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.config import SparseConfig
from tests.simic.rewards.stories import Story, close

SPARSE = RewardConfig(mode="sparse")


def grown(config: RewardConfig) -> Story:
    story = Story(config, horizon=20, seed_params=torch.full((13,), 50_000))
    story.hold(0)
    story.score = 60
    story.contribution[:] = torch.tensor([[2.0, 4.0]])
    story.wait(2)
    story.fossilize(0)
    story.hold(1)
    return story


def test_nothing_is_paid_before_the_end() -> None:
    story = grown(SPARSE)
    assert story.sum() == 0
    # 56 points without the seed that was never fossilized; the fossil is a tenth of the budget.
    assert close(float(story.finish().total), 0.56 - 0.1 * 0.1)


def test_the_reward_is_bounded_before_it_is_scaled() -> None:
    config = SPARSE.replace(sparse=SparseConfig(scale=0.5, limit=0.4))
    assert close(float(grown(config).finish().total), 0.5 * 0.4)


def test_a_rollback_costs_and_ends_it() -> None:
    assert float(grown(SPARSE).do(LifecycleOp.WAIT, rolled_back=True).total) == -10


def test_a_reward_that_is_all_terminal_cannot_do_without() -> None:
    with pytest.raises(ConfigError, match="disable_terminal_reward means nothing"):
        make_reward(SPARSE.replace(disable_terminal_reward=True))
