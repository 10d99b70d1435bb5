from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.modes import SHAPED_TERMS
from tests.simic.rewards.stories import Story, term

ESCROW = RewardConfig(mode="escrow")


def test_it_has_the_terms_of_shaped_and_what_is_forfeited() -> None:
    names = set(Story(ESCROW).wait().terms)
    assert names == set(SHAPED_TERMS) | {"escrow"}
    assert not make_reward(ESCROW).needs_twin


def test_growing_and_pruning_never_pays_even_while_the_host_learns() -> None:
    story = Story(ESCROW, slots=1, horizon=100)
    for _ in range(2):
        story.germinate()
        for _ in range(6):
            story.score += 1
            story.wait()
        story.contribution[:] = 3.0
        story.blend()
        story.wait(3)
        story.prune()
        story.wait(8)
        assert story.sum() < 0


def test_fossilizing_pays_more_than_holding_on() -> None:
    """What `shaped` pays for every epoch in which a good seed is kept undecided."""
    totals = {}
    for decides in (True, False):
        story = Story(ESCROW, slots=1, horizon=30)
        story.hold()
        story.score, story.contribution[:] = 55, 3.0
        story.wait(6)
        if decides:
            story.fossilize()
        story.finish()
        totals[decides] = story.sum()
        assert term(story.steps[-1], "terminal") > 0
    assert totals[True] > totals[False]
