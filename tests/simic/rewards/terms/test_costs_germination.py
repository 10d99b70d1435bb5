from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import FirstGerminationConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def both(story: Story) -> float:
    return story.sum("first_germination", "clawback", gamma=SHAPED.gamma)


def test_only_the_first_germination_earns_the_bonus() -> None:
    story = Story(SHAPED)
    assert close(term(story.germinate(0), "first_germination"), 0.2)
    story.blend(0)
    assert term(story.germinate(1), "first_germination") == 0


def test_pruning_that_seed_returns_the_bonus_with_interest() -> None:
    story = Story(SHAPED)
    story.wait(3)
    story.germinate()
    story.blend()
    step = story.prune()
    assert close(term(step, "clawback"), -0.2 / SHAPED.gamma**5)
    assert close(both(story), 0.0)
    story.wait(8)
    story.germinate()
    story.prune()
    assert close(both(story), 0.0), "it is returned once"


def test_a_seed_that_fades_out_returns_it_when_it_is_gone() -> None:
    story = Story(SHAPED)
    story.hold()
    assert term(story.prune(speed=1), "clawback") == 0
    story.wait(3)
    assert close(both(story), 0.0)


def test_a_seed_never_blended_by_the_end_returns_it() -> None:
    story = Story(SHAPED, horizon=8)
    story.germinate()
    story.advance()
    assert term(story.finish(), "clawback") < 0
    assert close(both(story), 0.0)


def test_germinating_in_the_last_step_gains_nothing() -> None:
    story = Story(SHAPED, horizon=4)
    story.wait(2)
    step = story.germinate()
    assert not story.active
    assert close(term(step, "first_germination") + term(step, "clawback"), 0.0)


def test_a_seed_that_is_blended_or_fossilized_keeps_it() -> None:
    for last in ("blend", "hold"):
        story = Story(SHAPED, horizon=12)
        if last == "blend":
            story.germinate()
            story.blend()
        else:
            story.hold()
            story.fossilize()
        story.finish()
        assert close(both(story), 0.2)


def test_a_rollback_takes_it_back_unless_it_was_never_paid() -> None:
    story = Story(SHAPED)
    story.germinate()
    story.do(LifecycleOp.WAIT, rolled_back=True)
    assert close(both(story), 0.0)
    story = Story(SHAPED)
    story.do(LifecycleOp.GERMINATE, blueprint=1, rolled_back=True)
    assert both(story) == 0.0


def test_it_need_not_be_returned() -> None:
    config = SHAPED.replace(first_germination=FirstGerminationConfig(is_returned=False))
    story = Story(config)
    story.germinate()
    story.prune()
    assert close(both(story), 0.2)
