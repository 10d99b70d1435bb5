import pytest

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def test_costs_of_the_ops() -> None:
    story = Story(SHAPED)
    assert term(story.wait(), "action") == 0
    assert close(term(story.germinate(), "action"), -0.15)
    assert term(story.advance(), "action") == 0
    story.advance()
    story.wait(2)
    assert close(term(story.set_alpha(0), "action"), -0.005)


@pytest.mark.parametrize(
    ("score", "worth", "epochs", "value"),
    [
        (55, 2.0, 1, (0.5 + 0.2) * 0.2),
        (55, 2.0, 5, 0.7),
        (55, 2.0, 9, 0.7),
        (55, 0.9, 9, -0.2),
        (55, -5.0, 9, -0.2),
        (49, 0.0, 3, -0.5 - 0.2),
        (49, 2.0, 3, -0.5 - 0.2 - 0.3),
        (49.9, 2.0, 3, -0.5 - 0.02),
        (30, 0.0, 3, -0.5 - 1.0),
    ],
)
def test_fossilizing(score: float, worth: float, epochs: int, value: float) -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    story.blend()
    story.score, story.contribution[:] = score, worth
    story.advance()
    if epochs > 1:
        story.wait(epochs - 1)
    assert close(term(story.fossilize(), "action"), -0.01 + value, 1e-4)


@pytest.mark.parametrize(
    ("worth", "value"),
    [(-2.0, 0.15), (-0.5, 0.1), (-0.1, 0.1), (0.0, -0.3), (4.0, -0.5), (50, -0.9)],
)
def test_pruning_what_was_measured(worth: float, value: float) -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    story.contribution[:] = worth
    story.blend()
    assert close(term(story.prune(), "action"), -0.005 + value)


def test_pruning_harm_too_young_to_be_sure_costs() -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    story.contribution[:] = -2.0
    story.wait()
    assert close(term(story.prune(), "action"), -0.005 - 0.1)


@pytest.mark.parametrize(("age", "value"), [(1, -0.1), (4, -0.1), (5, 0.0), (9, 0.0)])
def test_pruning_what_was_never_measured(age: int, value: float) -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    if age > 1:
        story.wait(age - 1)
    assert close(term(story.prune(), "action"), -0.005 + value)


def test_a_refused_op_counts_as_waiting() -> None:
    story = Story(SHAPED)
    assert term(story.prune(), "action") == 0
    assert term(story.fossilize(), "action") == 0


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


def test_holding_a_seed_that_is_no_good_is_not_warned_about() -> None:
    story = holding(SHAPED)
    story.contribution[:] = -1.0
    story.wait(5)
    assert story.sum("holding") == 0


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
