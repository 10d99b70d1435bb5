from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import GovernorRewardConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def test_every_seed_the_governor_removes_costs_and_fossils_stay() -> None:
    story = Story(SHAPED, slots=3)
    story.hold(0)
    story.fossilize(0)
    story.hold(1)
    story.germinate(2)
    step = story.do(LifecycleOp.WAIT, rolled_back=True)
    assert close(term(step, "auto_prune"), -0.4)
    assert term(step, "rollback") == -10


def test_pruning_by_hand_is_no_business_of_the_governor() -> None:
    story = Story(SHAPED)
    story.germinate()
    assert term(story.prune(), "auto_prune") == 0


def test_the_penalty_is_configured() -> None:
    config = SHAPED.replace(governor=GovernorRewardConfig(rollback_penalty=3.0))
    assert float(Story(config).do(LifecycleOp.WAIT, rolled_back=True).total) == -3
