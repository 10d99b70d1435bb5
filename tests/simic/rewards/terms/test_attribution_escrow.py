import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import Story, close, term

ESCROW = RewardConfig(mode="escrow")


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
