import math

import torch

from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, detail

SHAPED = RewardConfig(mode="shaped")


def test_without_a_seed_there_is_nothing_to_say() -> None:
    step = Story(SHAPED).wait()
    for name in ("regress_discount", "timing_discount", "attribution_ratio"):
        assert math.isnan(detail(step, name))
    assert detail(step, "ransomware_penalty") == 0
    assert detail(step, "shaped_reward_ratio") == 0


def test_of_several_seeds_the_most_suspicious_is_reported() -> None:
    story = Story(SHAPED)
    story.wait(15)
    story.hold(0)
    story.score = 52
    story.germinate(1)
    story.score = 50.5
    story.contribution[:] = torch.tensor([[4.0, 4.0]])
    story.blend(1)
    step = story.wait()
    assert close(detail(step, "regress_discount"), 1 / (1 + math.exp(4.5)))
    assert close(detail(step, "attribution_ratio"), 4 / 0.5)
    assert detail(step, "timing_discount") == 1
    assert close(detail(step, "ransomware_penalty"), -0.1 * (8 - 5) / 5 / 2)


def test_a_seed_that_holds_points_hostage_is_counted() -> None:
    story = Story(SHAPED, slots=1)
    story.hold()
    story.score, story.contribution[:] = 49, 3.0
    story.wait()
    assert detail(story.wait(), "ransomware_seeds") == 1


def test_share_of_shaping() -> None:
    step = Story(SHAPED).germinate()
    absolute = sum(abs(float(value)) for value in step.terms.values())
    assert close(detail(step, "shaped_reward_ratio"), abs(float(step.terms["pbrs"])) / absolute)
