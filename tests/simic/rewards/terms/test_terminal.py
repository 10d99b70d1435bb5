import math

import torch

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import TerminalConfig
from esper.simic.rewards.terms.terminal import committed_score
from tests.simic.rewards.stories import Story, close, term

SHAPED = RewardConfig(mode="shaped")


def with_fossils(config: RewardConfig, count: int) -> Story:
    story = Story(config, slots=3, horizon=40)
    for slot in range(count):
        story.hold(slot)
        story.score += 2
        story.contribution[:] = 1.5
        story.wait(2)
        story.fossilize(slot)
    return story


def test_terminal_is_paid_once_at_the_end() -> None:
    story = with_fossils(SHAPED, 2)
    assert story.sum("terminal") == 0
    assert close(term(story.finish(), "terminal"), 0.05 * 54 + 3 * math.tanh(2 / 3))


def test_without_saturation_every_fossil_counts_alike() -> None:
    config = SHAPED.replace(terminal=TerminalConfig(fossil_saturation=None))
    assert close(term(with_fossils(config, 2).finish(), "terminal"), 0.05 * 54 + 6)


def test_a_fossil_without_improvement_is_not_counted() -> None:
    config = SHAPED.replace(terminal=TerminalConfig(min_improvement=5.0))
    assert close(term(with_fossils(config, 2).finish(), "terminal"), 0.05 * 54)


def test_a_fossil_of_the_last_step_counts() -> None:
    story = Story(SHAPED, horizon=10)
    story.hold()
    story.score, story.contribution[:] = 52, 1.5
    story.wait(2)
    step = story.fossilize()
    assert not story.active
    assert close(term(step, "terminal"), 0.05 * 52 + 3 * math.tanh(1 / 3))


def test_the_committed_score_is_that_without_the_undecided() -> None:
    """f(none) of two seeds: f(a) = 52, f(b) = 51, f(ab) = 54, f(none) = 50."""
    story = Story(SHAPED)
    story.hold(0)
    story.germinate(1)
    story.score = 54
    story.contribution[:] = torch.tensor([[54 - 51, 54 - 52]])
    story.interaction[0] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    story.blend(1)
    assert close(float(committed_score(story.signals)), 50)


def test_fossils_and_unmeasured_seeds_are_part_of_the_committed_score() -> None:
    story = Story(SHAPED)
    story.hold(0)
    story.score, story.contribution[:] = 54, 4.0
    story.wait()
    assert close(float(committed_score(story.signals)), 50)
    story.fossilize(0)
    story.germinate(1)
    assert close(float(committed_score(story.signals)), 54)
