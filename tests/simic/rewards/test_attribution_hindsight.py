import math

import torch

from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, detail

GAMMA = 0.9
CONFIG = RewardConfig(mode="shaped", gamma=GAMMA)


def boosted(config: RewardConfig, score: float = 54.0) -> Story:
    """Slot 1 was boosted by slot 0 at one epoch, which `story.boost` names."""
    story = Story(config)
    story.hold(0)
    story.germinate(1)
    story.blend(1)
    story.score = score
    story.interaction[0] = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    story.wait()
    story.boost = int(story.signals.epoch)  # type: ignore[attr-defined]
    story.interaction.zero_()
    story.contribution[:] = 2.0
    return story


def test_credit_is_discounted_by_the_age_of_the_boost() -> None:
    story = boosted(CONFIG)
    story.wait(3)
    story.advance(1)
    delay = int(story.signals.epoch) - story.boost  # type: ignore[attr-defined]
    step = story.fossilize(1)
    assert delay == 4
    wanted = 0.1 * math.tanh(0.1 * 5 * 4) * GAMMA**delay
    assert close(detail(step, "hindsight_credit"), wanted)
    assert detail(step, "scaffold_count") == 1
    assert detail(step, "scaffold_delay") == delay


def test_a_scaffold_that_is_gone_still_earns_it() -> None:
    story = boosted(CONFIG)
    story.prune(0)
    story.wait(8)
    story.advance(1)
    assert detail(story.fossilize(1), "hindsight_credit") > 0


def test_a_beneficiary_that_is_gone_leaves_nothing_to_the_next_seed_of_its_slot() -> None:
    story = boosted(CONFIG)
    story.prune(1)
    story.wait(8)
    story.hold(1)
    story.score = 70
    story.wait()
    assert detail(story.fossilize(1), "hindsight_credit") == 0


def test_boosts_are_credited_once() -> None:
    story = boosted(CONFIG)
    story.advance(1)
    assert detail(story.fossilize(1), "hindsight_credit") > 0
    step = story.fossilize(0)
    # Slot 0 was boosted as well, by slot 1.
    assert detail(step, "hindsight_credit") > 0
    assert story.sum("hindsight") > 0
    assert detail(story.wait(), "hindsight_credit") == 0


def test_there_is_no_credit_without_improvement() -> None:
    story = boosted(CONFIG, score=49.0)
    story.advance(1)
    step = story.fossilize(1)
    assert bool(story.signals.last_success)
    assert detail(step, "hindsight_credit") == 0
    assert math.isnan(detail(step, "scaffold_delay"))


def test_one_fossilization_earns_at_most_the_limit() -> None:
    story = boosted(CONFIG.replace(gamma=1.0), score=90.0)
    story.interaction[0] = torch.tensor([[0.0, 50.0], [50.0, 0.0]])
    story.wait(5)
    story.advance(1)
    assert close(detail(story.fossilize(1), "hindsight_credit"), 0.2)


def test_every_epoch_of_boosts_counts() -> None:
    story = boosted(CONFIG)
    story.interaction[0] = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    story.wait()
    story.interaction.zero_()
    story.advance(1)
    step = story.fossilize(1)
    size = 0.1 * math.tanh(0.1 * 5 * 4)
    assert close(detail(step, "hindsight_credit"), size * (GAMMA + GAMMA**2))
    assert detail(step, "scaffold_delay") == 1.5
