from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

SIMPLIFIED = RewardConfig(mode="simplified")


def test_acting_costs_a_little_whatever_is_done() -> None:
    story = Story(SIMPLIFIED)
    assert term(story.wait(), "action") == 0
    for step in (story.germinate(), story.advance(), story.advance()):
        assert close(term(step, "action"), -0.01)
    assert term(story.fossilize(), "action") == 0, "refused"


def test_the_end_pays_for_the_score_and_every_contributing_fossil() -> None:
    story = Story(SIMPLIFIED, horizon=20)
    story.hold()
    story.score, story.contribution[:] = 60, 2.0
    story.wait(2)
    story.fossilize()
    assert close(term(story.finish(), "terminal"), 3 * 0.6 + 2)


def test_planting_and_pruning_never_pays() -> None:
    story = Story(SIMPLIFIED, slots=1)
    for _ in range(3):
        story.germinate()
        story.wait(3)
        story.prune()
        story.wait(8)
        assert story.sum() < 0
        assert story.sum(gamma=SIMPLIFIED.gamma) < 0


def test_ablations() -> None:
    bare = SIMPLIFIED.replace(disable_pbrs=True, disable_terminal_reward=True)
    assert set(Story(bare).wait().terms) == {"action", "rollback"}
