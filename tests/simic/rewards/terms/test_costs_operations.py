import pytest

from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.rules import RulesConfig
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import OperationConfig
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
    story = Story(SHAPED.replace(operation=OperationConfig(prune_harmful_age=6)), slots=1)
    story.germinate()
    story.contribution[:] = -2.0
    story.blend()
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


def test_refusals_can_be_punished() -> None:
    old = LifecycleConfig(rules=RulesConfig(min_prune_age=4))
    config = OperationConfig(punish_refusals=True, min_prune_age=4)
    story = Story(SHAPED.replace(operation=config), slots=1, lifecycle=old)
    assert close(term(story.prune(), "action"), -0.2)
    assert close(term(story.fossilize(), "action"), -1.0)
    story.germinate()
    assert close(term(story.germinate(), "action"), -0.3)
    assert close(term(story.prune(), "action"), -0.3 * 2)
    assert term(story.set_alpha(0), "action") == 0
