import pytest

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import WarningConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def test_blending_while_worse_costs_more_every_epoch_up_to_a_limit() -> None:
    story = Story(SHAPED, slots=1)
    story.germinate(tempo=8)
    story.score = 48
    story.advance()
    story.advance()
    costs = [term(story.wait(), "blending") for _ in range(8)]
    assert costs == pytest.approx([-0.15, -0.2, -0.25, -0.3, -0.35, -0.4, -0.4, -0.4])


def test_blending_without_a_loss_costs_nothing() -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    story.blend()
    assert story.sum("blending") == 0


def holding(config: RewardConfig) -> Story:
    story = Story(config, slots=1)
    story.hold()
    story.score, story.contribution[:] = 55, 2.0
    return story


def test_holding_a_good_seed_undecided_costs_more_every_epoch_up_to_a_limit() -> None:
    story = holding(SHAPED)
    costs = [term(story.wait(), "holding") for _ in range(8)]
    assert costs == pytest.approx([0, -0.1, -0.15, -0.2, -0.25, -0.3, -0.3, -0.3])


def test_deciding_costs_nothing_and_retargeting_is_no_decision() -> None:
    for op, cost in (("fossilize", 0.0), ("prune", 0.0)):
        story = holding(SHAPED)
        story.wait(4)
        assert term(getattr(story, op)(), "holding") == cost
    story = holding(SHAPED)
    story.wait(4)
    assert term(story.set_alpha(2), "holding") < 0


def test_the_warning_can_be_for_waiting_alone() -> None:
    story = holding(SHAPED.replace(warning=WarningConfig(holding_ops="wait")))
    story.wait(4)
    assert close(term(story.set_alpha(2), "holding"), 0.0)
    assert term(story.wait(), "holding") < 0


def test_holding_a_seed_that_is_no_good_is_not_warned_about() -> None:
    story = holding(SHAPED)
    story.contribution[:] = -1.0
    story.wait(5)
    assert story.sum("holding") == 0
