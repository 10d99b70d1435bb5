import pytest

from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

MINIMAL = RewardConfig(mode="minimal")


@pytest.mark.parametrize(("age", "cost"), [(1, -0.1), (4, -0.1), (5, 0.0)])
def test_pruning_a_young_seed_costs(age: int, cost: float) -> None:
    story = Story(MINIMAL)
    story.germinate()
    if age > 1:
        story.wait(age - 1)
    assert close(float(story.prune().total), cost)


def test_the_end_is_that_of_sparse() -> None:
    story = Story(MINIMAL, horizon=5)
    assert close(term(story.finish(), "terminal"), 0.5)
