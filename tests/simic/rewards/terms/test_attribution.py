from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.config import (
    AttributionConfig,
    Combination,
    HindsightConfig,
    RansomwareConfig,
    TimingConfig,
)
from esper.simic.rewards.terms.attribution import (
    bound_contribution,
    ransomware_penalty,
    regress_discount,
)
from esper.simic.rewards.view import StepView
from tests.simic.rewards.stories import Story, close, detail, term

SHAPED = RewardConfig(mode="shaped")
PLAIN = SHAPED.replace(timing=TimingConfig(epochs=0))


class Seed:
    """Stands in for a view of one seed with these figures."""

    def __init__(self, config: RewardConfig, contribution: float, improvement: float) -> None:
        self.config = config
        self.contribution = torch.tensor([[contribution]])
        self.improvement = torch.tensor([[improvement]])

    def once(self, compute: Callable[[Seed], Tensor]) -> Tensor:
        return compute(self)


def look(compute: Callable[[StepView], Tensor], worth: float, improvement: float) -> float:
    return float(compute(Seed(SHAPED, worth, improvement)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("improvement", "discount"), [(0.0, 1.0), (3.0, 1.0), (-0.1, 0.4256), (-0.5, 0.1824)]
)
def test_regress_discount(improvement: float, discount: float) -> None:
    assert close(look(regress_discount, 1.0, improvement), discount, 1e-3)


def test_regress_discount_of_a_disaster_is_finite() -> None:
    assert look(regress_discount, 1.0, -1e6) == 0.0


@pytest.mark.parametrize(
    ("worth", "improvement", "penalty"),
    [
        (1.0, 0.0, 0.0),
        (1.5, 0.05, -0.3 * 0.15),
        (20.0, 0.0, -0.3),
        (4.0, 1.0, 0.0),
        (10.0, 1.0, -0.1),
        (50.0, 1.0, -0.3),
        (20.0, -1.0, 0.0),
        (math.nan, 0.0, 0.0),
    ],
)
def test_ransomware_penalty(worth: float, improvement: float, penalty: float) -> None:
    assert close(look(ransomware_penalty, worth, improvement), penalty)


@given(
    worth=st.floats(0, 100),
    progress=st.floats(-10, 100),
    combination=st.sampled_from(["harmonic", "geometric", "minimum"]),
)
def test_no_more_is_attributed_than_contributed_nor_out_of_proportion_to_the_progress(
    worth: float, progress: float, combination: Combination
) -> None:
    bounded = float(
        bound_contribution(torch.tensor(worth), torch.tensor(progress), combination, 0.5)
    )
    assert 0 <= bounded <= worth * (1 + 1e-6)
    if progress <= 0:
        assert bounded == 0
    elif worth >= progress:
        most = {"harmonic": 2 * progress, "geometric": math.sqrt(worth * progress)}
        assert bounded <= most.get(combination, progress) * (1 + 1e-5) + 1e-6


def test_combinations_by_hand() -> None:
    worth, progress = torch.tensor(8.0), torch.tensor(2.0)
    assert float(bound_contribution(worth, progress, "harmonic", 0.5)) == pytest.approx(3.2)
    assert float(bound_contribution(worth, progress, "geometric", 0.5)) == pytest.approx(4.0)
    assert float(bound_contribution(worth, progress, "minimum", 0.5)) == 2.0
    assert float(bound_contribution(worth, torch.tensor(math.nan), "harmonic", 0.5)) == 4.0
    assert float(bound_contribution(progress, worth, "harmonic", 0.5)) == 2.0


@pytest.mark.parametrize(("waits", "discount"), [(0, 0.46), (4, 0.7), (9, 1.0), (20, 1.0)])
def test_early_seeds_count_less(waits: int, discount: float) -> None:
    story = Story(SHAPED, slots=1)
    if waits:
        story.wait(waits)
    story.germinate()
    assert close(float(story.wait().details["timing_discount"]), discount)


def test_the_discount_for_early_seeds_can_be_off() -> None:
    for config in (SHAPED.replace(disable_timing_discount=True), PLAIN):
        story = Story(config)
        story.germinate()
        assert float(story.wait().details["timing_discount"]) == 1.0


def held(config: RewardConfig, score: float, contribution: float) -> Story:
    """A seed in HOLDING that has been measured like this."""
    story = Story(config, slots=1)
    story.hold()
    story.score, story.contribution[:] = score, contribution
    story.wait()
    return story


def test_a_measured_seed_is_paid_its_bounded_contribution() -> None:
    assert close(term(held(PLAIN, 54, 8).wait(), "attribution"), 2 * 4 * 8 / 12)
    assert close(term(held(PLAIN, 54, 3).wait(), "attribution"), 3)
    assert close(term(held(PLAIN, 54, -3).wait(), "attribution"), -3)


def test_a_seed_without_progress_is_paid_nothing() -> None:
    assert term(held(PLAIN, 50, 0.5).wait(), "attribution") == 0


def test_a_penalty_stays_one_when_the_seed_is_pruned() -> None:
    """Turning the sign of everything would make a bonus of it."""
    config = PLAIN.replace(ransomware=RansomwareConfig(max_ratio=1.0))
    waiting, pruning = held(config, 54, 8), held(config, 54, 8)
    earned = 2 * 4 * 8 / 12
    penalty = -0.1 * (8 / 4 - 1)
    assert close(term(waiting.wait(), "attribution"), earned + penalty)
    assert close(term(pruning.prune(), "attribution"), -earned + penalty)


def test_a_seed_that_was_never_measured_shares_the_progress() -> None:
    story = Story(PLAIN, slots=1)
    story.germinate()
    story.score = 52
    story.wait()
    assert close(term(story.wait(), "attribution"), 0.3 * 2)
    assert term(story.wait(), "attribution") == 0


def test_pruning_it_returns_that_credit() -> None:
    story = Story(PLAIN, slots=1)
    story.germinate()
    story.score = 52
    story.wait(3)
    story.prune()
    assert close(story.sum("attribution"), 0.0)


def test_waiting_is_attributed_to_the_mean_over_live_seeds() -> None:
    story = Story(PLAIN, slots=3)
    story.hold(0)
    story.germinate(1)
    story.blend(1)
    story.germinate(2)
    story.score, story.contribution[:] = 54, torch.tensor([[3.0, -1.0, 9.0]])
    story.wait()
    # The third seed is not measured: it has 0.3 of the four points of progress.
    assert close(term(story.wait(), "attribution"), (3 - 1 + 0.3 * 4) / 3)


def test_a_fossil_is_not_attributed_any_more() -> None:
    story = held(PLAIN, 54, 3)
    story.fossilize()
    assert term(story.wait(), "attribution") == 0


def test_a_refund_is_at_most_what_the_seed_has_cost() -> None:
    story = Story(PLAIN, slots=1)
    story.germinate()
    story.contribution[:] = -0.5
    story.blend()
    charged = story.sum("attribution")
    story.contribution[:] = -20.0
    story.advance()
    assert charged == -1.0
    # Charged by now: twice 0.5 while it blended, and once when it was moved on.
    assert close(term(story.prune(), "attribution"), 1.5)


def test_the_documents_refund_all_of_it() -> None:
    config = PLAIN.replace(attribution=AttributionConfig(settles_prunes=False))
    story = held(config, 50, -20)
    assert close(term(story.prune(), "attribution"), 20)


GAMMA = 0.9
CONFIG = RewardConfig(mode="shaped", gamma=GAMMA, hindsight=HindsightConfig(limit=9.0))


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
    story = boosted(CONFIG.replace(hindsight=HindsightConfig(), gamma=1.0), score=90.0)
    story.interaction[0] = torch.tensor([[0.0, 50.0], [50.0, 0.0]])
    story.wait(5)
    story.advance(1)
    assert close(detail(story.fossilize(1), "hindsight_credit"), 0.2)


def test_every_epoch_of_boosts_counts() -> None:
    story = boosted(CONFIG)
    story.interaction[0] = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    story.wait(2)
    story.interaction.zero_()
    story.advance(1)
    step = story.fossilize(1)
    size = 0.1 * math.tanh(0.1 * 5 * 4)
    assert close(detail(step, "hindsight_credit"), size * (GAMMA + GAMMA**2 + GAMMA**3))
    assert detail(step, "scaffold_delay") == 2
