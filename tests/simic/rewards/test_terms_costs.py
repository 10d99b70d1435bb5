import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig, terms
from esper.simic.rewards.terms import effective_params
from tests.simic.rewards.stories import Story, close, every_seed, term

SHAPED = RewardConfig(mode="shaped")
HOST = 10_000


def held(config: RewardConfig, size: int, slots: int = 1) -> Story:
    story = Story(config, slots=slots, seed_params=every_seed(size))
    story.hold()
    return story


def test_rent_is_the_logarithm_of_the_growth_in_use() -> None:
    story = held(SHAPED, 5_000)
    assert close(term(story.wait(), "rent"), -0.5 * math.log1p(0.0039 + 0.5))


def test_rent_has_a_limit() -> None:
    assert term(held(SHAPED, 10_000_000).wait(), "rent") == -1.5


def test_amplitude_counts_and_fossils_go_on_paying() -> None:
    story = held(SHAPED, 5_000)
    story.set_alpha(0)
    assert close(float(effective_params(story.signals)), 39 + 2_500)
    story = held(SHAPED, 5_000)
    before = term(story.wait(), "rent")
    assert term(story.fossilize(), "rent") == before


def test_a_tiny_host_is_not_punished_out_of_proportion() -> None:
    signals = held(SHAPED, 50).signals
    tiny: Any = SimpleNamespace(after=replace(signals, host_params=torch.tensor([10])))
    assert close(float(terms.rent(tiny)), -0.5 * math.log1p((0.039 + 50) / 200))


def test_occupancy_counts_live_and_fossilized_seeds_and_no_cooling_slots() -> None:
    story = held(SHAPED, 100, slots=3)
    assert term(story.wait(), "occupancy") == 0
    assert close(term(story.germinate(1), "occupancy"), -0.01)
    story.score = 55
    assert close(term(story.fossilize(0), "occupancy"), -0.01 - 0.002)
    assert close(term(story.prune(1), "occupancy"), -0.002)


def test_shock_is_the_squared_change_by_size() -> None:
    story = held(SHAPED, 5_000)
    assert term(story.wait(), "shock") == 0
    assert close(term(story.set_alpha(0), "shock"), -0.1958 * 0.25 * 0.5)


def test_the_seed_that_is_removed_still_counts_with_its_size() -> None:
    assert close(term(held(SHAPED, 5_000).prune(), "shock"), -0.1958 * 0.5)


def test_shock_has_a_limit() -> None:
    assert term(held(SHAPED, 10_000_000).prune(), "shock") == -1.0


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
