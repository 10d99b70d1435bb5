import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError, UsageError
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.modes import TwinConfig
from esper.testing import random_episode
from esper.utils.randomness import generator
from tests.simic.rewards.stories import FADE, Story, close, detail, every_seed, term

TWIN = RewardConfig(mode="twin")
FREE = TWIN.replace(twin=TwinConfig(rent_points=0.0, open_seed_cost=0.0))


def test_terms_are_the_gain_the_rent_the_end_and_the_rollback() -> None:
    step = Story(TWIN).wait()
    assert tuple(step.terms) == ("gain", "rent", "terminal", "rollback")
    assert make_reward(TWIN).needs_twin


def test_a_row_that_waits_is_its_twin_and_gets_exactly_nothing() -> None:
    story = Story(TWIN, horizon=20)
    for points in range(18):
        story.score, story.twin = 50 + points, 49 + points
        assert float(story.wait().total) == 0.0
    assert float(story.finish().total) == 0.0


def test_an_op_that_was_refused_does_not_count_as_acting() -> None:
    story = Story(TWIN)
    story.score = 60
    step = story.fossilize()
    assert not bool(story.signals.last_success)
    assert float(step.total) == 0.0


def test_a_row_whose_seeds_take_no_part_is_its_twin_and_is_paid_nothing_but_rent() -> None:
    """Whatever is measured: 52 and 50 are what another order of adding up can make of one net."""
    story = Story(TWIN, horizon=8)
    story.score, story.twin = 52, 50
    story.germinate()
    story.advance()
    story.prune()
    story.finish()
    for step in story.steps:
        assert term(step, "gain") == 0.0
        assert float(step.total) == term(step, "rent") + term(step, "terminal")
    assert term(story.steps[0], "rent") < 0


def test_a_seed_counts_from_the_first_epoch_in_which_it_takes_part() -> None:
    story = Story(FREE)
    story.germinate()
    story.advance()
    story.score, story.twin = 52, 50
    assert close(float(story.advance().total), FREE.gamma * 2)
    assert float(story.signals.alpha[0, 0]) > 0
    story.score = 51
    assert close(float(story.wait().total), FREE.gamma * 1 - 2)
    assert detail(story.steps[-1], "gain_points") == 1


@given(seed=st.integers(0, 10_000), steps=st.integers(2, 20))
@settings(max_examples=8)
def test_the_discounted_sum_is_the_discounted_final_gain_less_costs(seed: int, steps: int) -> None:
    first, transitions = random_episode(6, 2, steps, generator(seed, "telescope"))
    reward = make_reward(TWIN)
    reward.reset(first)
    total, costs = torch.zeros(6), torch.zeros(6)
    parted, over = torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    gains = [torch.zeros(6)]
    expected = torch.zeros(6)
    for index, transition in enumerate(transitions):
        parted |= (transition.after.alpha > 0).any(1)
        gains.append(torch.where(parted, transition.after.val_score - transition.twin_after, 0.0))
        step = reward.step(transition)
        total += TWIN.gamma**index * step.total
        costs += TWIN.gamma**index * (step.terms["rent"] + step.terms["terminal"])
        final = torch.stack(gains[-5:]).mean(0)
        arrived = transition.active & transition.is_last & ~transition.after.rolled_back
        expected = torch.where(arrived, TWIN.gamma ** (index + 1) * final, expected)
        # A rollback gives up all that was gained and costs one more.
        lost = transition.active & transition.after.rolled_back
        expected = torch.where(lost, torch.tensor(-(TWIN.gamma**index)), expected)
        over |= transition.ended
    assert bool(over.all())
    assert torch.allclose(total, expected + costs, atol=1e-3)


def test_a_gain_that_is_lost_again_has_paid_nothing() -> None:
    story = Story(FREE, horizon=40)
    story.begin_blending()
    for _ in range(5):
        story.score = 60
        story.wait(2)
        assert detail(story.steps[-1], "gain_points") == 10
        story.score = 50
        story.wait(2)
    story.finish()
    assert close(story.sum(gamma=FREE.gamma), 0.0, 1e-4)


def test_undiscounted_thrashing_never_pays() -> None:
    story = Story(TWIN, horizon=120, slots=1)
    for _ in range(4):
        story.germinate()
        story.score = 55
        story.blend()
        story.score = 50
        story.prune()
        story.wait(8)
    story.finish()
    assert story.sum() < 0
    assert story.sum(gamma=TWIN.gamma) < 0


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("patience", [0, 4, 9])
def test_planting_and_pruning_never_pays(patience: int, drift: float) -> None:
    """The host learns by itself, and so does its twin."""
    story = Story(TWIN, horizon=100, slots=1)

    def learn(steps: int) -> None:
        for _ in range(steps):
            story.score = story.twin = story.score + drift
            story.wait()

    for cycle in range(2):
        story.germinate()
        learn(patience)
        story.prune()
        learn(8)
        assert story.sum() < 0, f"after {cycle + 1} cycles"
        assert story.sum(gamma=TWIN.gamma) < 0
    story.finish()
    assert story.sum() < 0


@pytest.mark.parametrize("harm", [0.1, 8.0])
def test_growing_harm_to_prune_it_never_pays(harm: float) -> None:
    story = Story(TWIN, slots=1)
    story.hold()
    story.score -= harm
    story.wait()
    story.score += harm
    recovery = story.prune()
    assert bool(story.signals.last_success)
    assert term(recovery, "gain") > 0, "the end of the harm pays for the deed"
    story.finish()
    assert story.sum(gamma=TWIN.gamma) < 0
    # Without the discount a point of harm earns 1 - gamma for every epoch it lasts, and no more.
    assert close(story.sum("gain"), (1 - TWIN.gamma) * harm, 1e-4)


def test_a_shock_costs_only_what_it_leaves_behind() -> None:
    """There is no shock term: a fall that is made good again is neither paid for nor charged."""
    calm, shaken, hurt = (Story(FREE, slots=1) for _ in range(3))
    for story in (calm, shaken, hurt):
        story.hold()
    for story, fall, rest in ((calm, 0.0, 0.0), (shaken, 6.0, 0.0), (hurt, 6.0, 2.0)):
        story.score -= fall
        story.prune()
        story.score += fall - rest
        story.finish()
    assert term(shaken.steps[6], "gain") == pytest.approx(-6.0 * FREE.gamma)
    assert close(shaken.sum(gamma=FREE.gamma), calm.sum(gamma=FREE.gamma), 1e-4)
    assert hurt.sum(gamma=FREE.gamma) < -1.0


@pytest.mark.parametrize("harm", [0.0, 0.1, 3.0])
def test_fossilizing_harm_never_pays(harm: float) -> None:
    keeping, pruning = Story(TWIN, slots=1), Story(TWIN, slots=1)
    for story in (keeping, pruning):
        story.hold()
        # The seed looks as if everything hung on it, and yet the twin does better.
        story.contribution[:] = 5.0
        story.score -= harm
        story.wait(3)
    paid = keeping.fossilize()
    assert bool(keeping.signals.last_success)
    assert float(paid.total) < (1 - TWIN.gamma) * harm + 1e-6, "no more than waiting"
    assert detail(paid, "seeds_contributing") == 0
    pruning.score += harm
    pruning.prune()
    for story in (keeping, pruning):
        story.finish()
        assert story.sum(gamma=TWIN.gamma) < 0
    assert keeping.sum(gamma=TWIN.gamma) < pruning.sum(gamma=TWIN.gamma)


def test_the_op_that_keeps_a_seed_is_paid_like_waiting() -> None:
    """Only the end tells them apart: what is undecided costs."""
    keeping, waiting = Story(TWIN, slots=1), Story(TWIN, slots=1)
    for story in (keeping, waiting):
        story.hold()
        story.score, story.contribution[:] = 53, 3.0
        story.wait(3)
    assert float(keeping.fossilize().total) == float(waiting.wait().total)
    saved = float(keeping.finish().total) - float(waiting.finish().total)
    assert close(saved, TWIN.twin.open_seed_cost)


def test_pruning_before_anything_was_measured_is_defined() -> None:
    story = Story(TWIN, slots=1)
    story.germinate()
    step = story.prune()
    assert bool(story.signals.last_success)
    assert bool(step.total.isfinite().all())
    assert term(step, "gain") == 0


@pytest.mark.parametrize("speed", [0, FADE])
def test_moving_alpha_back_and_forth_never_pays(speed: int) -> None:
    story = Story(TWIN, horizon=80, slots=1)
    story.hold()
    start = len(story.steps)
    for target in (0, 2, 0, 2):
        story.set_alpha(target, speed=speed)
        story.wait(8)
    assert sum(float(step.total) for step in story.steps[start:]) < 0


def test_rent_is_calibrated_by_the_whole_episode() -> None:
    # A seed as large as the host.
    story = Story(TWIN, horizon=41, seed_params=every_seed(10_000))
    story.germinate()
    story.finish()
    assert close(story.sum("rent"), -0.5)


def test_rent_for_operations_is_calibrated_likewise() -> None:
    # A seed that takes as many operations as the host, and hardly a parameter.
    config = TWIN.replace(twin=TwinConfig(flop_rent_points=0.25))
    sizes, operations = every_seed(1), every_seed(1_000_000)
    story = Story(config, horizon=41, seed_params=sizes, seed_flops=operations)
    story.germinate()
    story.finish()
    assert close(story.sum("rent"), -0.25 - 0.5 / 10_000)


def test_rent_grows_with_the_blueprint() -> None:
    rents = []
    for blueprint in (1, 2, 5, 9):
        story = Story(TWIN)
        rents.append(term(story.germinate(blueprint=blueprint), "rent"))
    assert sorted(rents, reverse=True) == rents
    assert rents[0] < 0


def test_the_final_gain_is_the_mean_of_the_last_five_epochs() -> None:
    story = Story(FREE, horizon=13)
    story.begin_blending()
    for gain in (0, 0, 0, 1, 2, 3, 4, 10, 0):
        story.score = 50 + gain
        last = story.wait()
    assert not story.active
    assert close(term(last, "gain"), FREE.gamma * (2 + 3 + 4 + 10 + 0) / 5 - 10)


def test_a_short_episode_has_fewer_epochs_to_average() -> None:
    story = Story(FREE, horizon=4)
    story.score = 53
    last = story.begin_blending()
    assert not story.active
    # All epochs but the last were the twin's own.
    assert close(term(last, "gain"), FREE.gamma * (0 + 0 + 0 + 3) / 4)


def test_a_rollback_pays_back_the_gain_and_one_more_and_ends_the_row() -> None:
    story = Story(TWIN)
    story.score = 57
    story.begin_blending()
    step = story.do(LifecycleOp.WAIT, rolled_back=True)
    assert {name: term(step, name) for name in step.terms} == {
        "gain": pytest.approx(-7.0),
        "rent": 0.0,
        "terminal": 0.0,
        "rollback": -1.0,
    }
    assert not story.active
    assert float(story.wait().total) == 0.0


def test_a_rollback_of_a_row_that_only_waited_costs_one() -> None:
    assert float(Story(TWIN).do(LifecycleOp.WAIT, rolled_back=True).total) == -1.0


def test_a_missing_twin_is_refused_once_it_is_needed() -> None:
    story = Story(TWIN)
    story.twin = float("nan")
    assert float(story.wait().total) == 0.0
    story.germinate()
    story.advance()
    with pytest.raises(UsageError, match=r"rows \[0\] have no twin score"):
        story.advance()


def scaffolded(config: RewardConfig, horizon: int = 60) -> Story:
    """A seed in slot 1 that another one in slot 0 has boosted, ready to fossilize."""
    story = Story(config, horizon=horizon)
    story.hold(0)
    story.germinate(1)
    story.interaction[0] = torch.tensor([[0.0, 4.0], [4.0, 0.0]])
    story.contribution[:] = 2.0
    story.score = story.twin = 55
    story.blend(1)
    story.prune(0)
    story.advance(1)
    return story


def test_hindsight_credit_is_recorded_and_not_paid() -> None:
    story = scaffolded(TWIN)
    step = story.fossilize(1)
    assert detail(step, "hindsight_credit") > 0
    assert detail(step, "scaffold_count") == 1
    assert detail(step, "scaffold_delay") > 0
    assert "hindsight" not in step.terms
    assert detail(story.wait(), "hindsight_credit") == 0


def test_hindsight_credit_is_paid_if_the_configuration_says_so() -> None:
    story = scaffolded(TWIN.replace(pay_hindsight=True))
    step = story.fossilize(1)
    assert term(step, "hindsight") == 0
    assert close(term(story.wait(), "hindsight"), detail(step, "hindsight_credit"))


def test_credit_earned_in_the_last_step_is_paid_there() -> None:
    paying = TWIN.replace(pay_hindsight=True)
    length = len(scaffolded(paying).steps)
    story = scaffolded(paying, horizon=length + 2)
    step = story.fossilize(1)
    assert not story.active
    assert term(step, "hindsight") > 0
    assert close(term(step, "hindsight"), detail(step, "hindsight_credit"))


def test_credit_that_is_pending_at_a_rollback_is_lost_with_the_gain() -> None:
    story = scaffolded(TWIN.replace(pay_hindsight=True))
    assert detail(story.fossilize(1), "hindsight_credit") > 0
    step = story.do(LifecycleOp.WAIT, rolled_back=True)
    assert term(step, "hindsight") == 0
    assert close(float(step.total), term(step, "gain") - 1.0)


def test_ablation_switches_of_other_modes_are_refused() -> None:
    for switch in ("disable_pbrs", "disable_terminal_reward", "disable_timing_discount"):
        with pytest.raises(ConfigError, match=f"'twin' has no ablation {switch}"):
            make_reward(dataclasses.replace(TWIN, **{switch: True}))


def test_counters_follow_what_happened() -> None:
    story = Story(TWIN)
    story.hold(0)
    story.germinate(1)
    story.score, story.contribution[:] = 55, 1.0
    story.wait(2)
    story.fossilize(0)
    step = story.prune(1)
    counts = {
        name: detail(step, name)
        for name in ("seeds_germinated", "seeds_fossilized", "seeds_contributing", "seeds_pruned")
    }
    assert counts == {
        "seeds_germinated": 2,
        "seeds_fossilized": 1,
        "seeds_contributing": 1,
        "seeds_pruned": 1,
    }


def test_a_seed_that_nobody_decided_on_costs_at_the_end_alone() -> None:
    story = Story(TWIN.replace(twin=TwinConfig(rent_points=0.0)), horizon=6)
    story.germinate()
    assert float(story.wait().terms["terminal"]) == 0.0
    assert close(float(story.finish().terms["terminal"]), -TWIN.twin.open_seed_cost)


def test_waiting_to_the_end_costs_nothing() -> None:
    assert float(Story(TWIN, horizon=6).finish().total) == 0.0


def test_the_potential_is_the_gain_that_was_paid_for() -> None:
    story = Story(FREE, horizon=20)
    story.germinate()
    story.advance()
    story.score, story.twin = 53, 50
    potential = story.advance().potential
    assert potential is not None
    assert close(float(potential), 3.0)
    story.score = 51
    before, step = float(potential), story.wait()
    assert step.potential is not None
    assert close(float(step.total), FREE.gamma * float(step.potential) - before)
