from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.attribution import (
    Combination,
    bound_contribution,
    ransomware_penalty,
    regress_discount,
)
from esper.simic.rewards.contract import StepView
from tests.simic.rewards.stories import Story, close, detail, term

SHAPED = RewardConfig(mode="shaped")
ESCROW = RewardConfig(mode="escrow")
PLAIN = SHAPED.replace(disable_timing_discount=True)


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
    # As exact in float32 as here.
    worth=st.floats(0, 100, width=32, allow_subnormal=False),
    progress=st.floats(-10, 100, width=32, allow_subnormal=False),
    combination=st.sampled_from(["harmonic", "geometric", "minimum"]),
)
def test_no_more_is_attributed_than_contributed_nor_out_of_proportion_to_the_progress(
    worth: float, progress: float, combination: Combination
) -> None:
    bounded = float(bound_contribution(torch.tensor(worth), torch.tensor(progress), combination))
    assert 0 <= bounded <= worth * (1 + 1e-6)
    if progress <= 0:
        assert bounded == 0
    elif worth >= progress:
        most = {"harmonic": 2 * progress, "geometric": math.sqrt(worth * progress)}
        assert bounded <= most.get(combination, progress) * (1 + 1e-5) + 1e-6


def test_combinations_by_hand() -> None:
    worth, progress = torch.tensor(8.0), torch.tensor(2.0)
    assert float(bound_contribution(worth, progress, "harmonic")) == pytest.approx(3.2)
    assert float(bound_contribution(worth, progress, "geometric")) == pytest.approx(4.0)
    assert float(bound_contribution(worth, progress, "minimum")) == 2.0
    assert float(bound_contribution(worth, torch.tensor(math.nan), "harmonic")) == 4.0
    assert float(bound_contribution(progress, worth, "harmonic")) == 2.0


@pytest.mark.parametrize(("waits", "discount"), [(0, 0.46), (4, 0.7), (9, 1.0), (20, 1.0)])
def test_early_seeds_count_less(waits: int, discount: float) -> None:
    story = Story(SHAPED, slots=1)
    if waits:
        story.wait(waits)
    story.germinate()
    assert close(float(story.wait().details["timing_discount"]), discount)


def test_the_discount_for_early_seeds_can_be_off() -> None:
    story = Story(PLAIN)
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
    waiting, pruning = held(PLAIN, 51, 8), held(PLAIN, 51, 8)
    earned = 2 * 1 * 8 / 9
    penalty = -0.1 * (8 - 5) / 5
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


# ---------------------------------------------------------------------------------------- escrow


def credited(horizon: int = 60) -> Story:
    """A seed in HOLDING whose balance has reached sqrt(3 * 12) = 6 in three steps of two."""
    story = Story(ESCROW, slots=1, horizon=horizon)
    story.hold()
    story.score, story.contribution[:] = 53, 12.0
    story.wait(6)
    return story


def test_the_balance_moves_in_bounded_steps_to_what_was_earned() -> None:
    story = credited()
    moves = [term(step, "attribution") for step in story.steps if term(step, "attribution")]
    assert moves == pytest.approx([2, 2, 2])
    assert term(story.wait(), "attribution") == 0


def test_what_was_earned_shows_only_when_the_score_is_stable() -> None:
    story = Story(ESCROW, slots=1)
    story.hold()
    story.score, story.contribution[:] = 53, 12.0
    moves = [term(story.wait(), "attribution") for _ in range(5)]
    assert moves == pytest.approx([0, 0, 0, 2, 2])


def test_pruning_takes_the_balance_back() -> None:
    story = credited()
    story.prune()
    assert close(story.sum("attribution"), 0.0)


def test_a_seed_that_fades_earns_nothing_any_more() -> None:
    story = credited()
    story.prune(speed=3)
    assert close(story.sum("attribution"), 0.0)
    story.wait(12)
    assert close(story.sum("attribution"), 0.0)


def test_harm_takes_it_back_and_costs_its_harm() -> None:
    story = credited()
    held = story.sum("attribution")
    story.contribution[:] = -1.0
    story.wait()
    assert close(term(story.wait(), "attribution"), -1.0 - held)
    assert close(term(story.wait(), "attribution"), -1.0)


def test_fossilizing_keeps_it() -> None:
    story = credited()
    story.fossilize()
    paid = story.sum("attribution")
    assert paid > 5
    story.finish()
    assert story.sum("attribution") == paid
    assert story.sum("escrow") == 0


@pytest.mark.parametrize("rolled_back", [False, True])
def test_the_end_forfeits_what_is_not_fossilized(rolled_back: bool) -> None:
    story = credited()
    story.do(LifecycleOp.WAIT, rolled_back=rolled_back)
    story.finish()
    assert close(story.sum("attribution", "escrow"), 0.0)


def test_fossilizing_after_a_loss_never_raises_the_balance() -> None:
    story = Story(ESCROW, slots=1)
    story.germinate()
    story.score = 60
    story.advance()
    story.advance()
    story.wait(2)
    story.advance()
    story.score, story.contribution[:] = 50.5, 5.0
    story.wait(3)
    step = story.fossilize()
    assert bool(story.signals.last_success)
    assert term(step, "attribution") <= 0


def test_balances_of_all_slots_are_summed() -> None:
    story = Story(ESCROW)
    story.hold(0)
    story.germinate(1)
    story.blend(1)
    story.score, story.contribution[:] = 60, torch.tensor([[1.0, 1.5]])
    story.wait(6)
    assert close(story.sum("attribution"), 2.5)


# --------------------------------------------------------------------------------------- synergy


def pair(together: float, score: float = 54, worth: float = 1.0) -> Story:
    story = Story(SHAPED)
    story.hold(0)
    story.germinate(1)
    story.contribution[:] = worth
    story.interaction[0] = torch.tensor([[0.0, together], [together, 0.0]])
    story.score = score
    story.blend(1)
    return story


def test_seeds_that_help_each_other_earn_a_bonus() -> None:
    assert close(term(pair(2.0).wait(), "synergy"), 0.1 * math.tanh(1.0))


def test_no_bonus_for_seeds_in_each_others_way_nor_for_harm_nor_after_a_loss() -> None:
    assert term(pair(-2.0).wait(), "synergy") == 0
    assert term(pair(2.0, worth=-1.0).wait(), "synergy") == 0
    assert term(pair(2.0, score=45).wait(), "synergy") == 0


# --------------------------------------------------------------------------------------- details


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
