import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.signals import Signals
from esper.nissa.monitors.rewards import STEERING
from esper.simic.rewards import (
    REWARDS,
    ComposedReward,
    RewardConfig,
    Transition,
    make_reward,
)
from esper.simic.rewards.modes import SHAPED_TERMS, LossConfig, SparseConfig, TwinConfig
from esper.tamiyo.controllers.baselines import RandomController
from esper.testing import random_episode, random_signals
from esper.utils.randomness import generator
from tests.simic.rewards.comparing import assert_matches_reference
from tests.simic.rewards.stories import Story, close, every_seed, term

MODES = ("twin", "shaped", "escrow", "sparse", "minimal", "basic", "simplified", "loss")


def unrelated_episode(
    rows: int, slots: int, steps: int, seed: int
) -> tuple[Signals, list[Transition]]:
    """Signals that have nothing to do with each other but the clock; some hosts start grown."""
    stream = generator(seed, "unrelated")
    controller = RandomController(seed)
    told: list[Signals] = []
    chosen: list[dict[str, Tensor]] = []
    for epoch in range(1, steps + 2):
        signals, masks = random_signals(rows, slots, stream)
        chosen.append(controller.act(signals, masks))
        clock = {"epoch": epoch, "max_epochs": steps + 1}
        times = {name: torch.full((rows,), value) for name, value in clock.items()}
        age = signals.age.clamp(max=epoch - 1)
        told.append(dataclasses.replace(signals, **times, age=age))
    transitions = []
    active = torch.ones(rows, dtype=torch.bool)
    for before, after, actions in zip(told, told[1:], chosen, strict=False):
        transition = Transition(
            before=before,
            actions=actions,
            after=after,
            twin_before=before.val_score - 1,
            twin_after=after.val_score - 1,
            is_last=after.epoch == after.max_epochs,
            active=active,
        )
        transitions.append(transition)
        active = active & ~transition.ended
    return told[0], transitions


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_agrees_with_the_reference(mode: str) -> None:
    episode = random_episode(24, 3, 30, generator(0, "reference"))
    paid = assert_matches_reference(RewardConfig(mode=mode), *episode)
    silent = {name for name, times in paid.items() if times == 0}
    assert not silent, "a comparison of zeros proves nothing"


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 4))
@settings(max_examples=4)
def test_every_mode_agrees_with_the_reference_on_whatever_signals(
    mode: str, seed: int, slots: int
) -> None:
    assert_matches_reference(RewardConfig(mode=mode), *unrelated_episode(4, slots, 10, seed))


@pytest.mark.parametrize(
    "config",
    [
        RewardConfig(mode="shaped", combination="geometric"),
        RewardConfig(mode="twin", pay_hindsight=True, gamma=0.9),
        RewardConfig(mode="shaped", disable_pbrs=True, disable_terminal_reward=True),
        RewardConfig(mode="shaped", disable_anti_gaming=True, disable_timing_discount=True),
        RewardConfig(mode="shaped", combination="minimum"),
        RewardConfig(mode="twin", twin=TwinConfig(flop_rent_points=0.25)),
        RewardConfig(
            mode="loss",
            loss=LossConfig(typical_change=0.15, rent_weight=0.01, baseline=10.8, target=3.5),
        ),
        RewardConfig(mode="sparse", sparse=SparseConfig(scale=0.5)),
    ],
    ids=["geometric", "hindsight", "bare", "trusting", "minimum", "flops", "text loss", "text end"],
)
def test_variants_agree_with_the_reference(config: RewardConfig) -> None:
    assert_matches_reference(config, *random_episode(8, 3, 24, generator(0, "variants")))
    assert_matches_reference(config, *unrelated_episode(8, 3, 12, 0))


def test_these_are_all_the_modes() -> None:
    assert set(MODES) == set(REWARDS.names())


@pytest.mark.parametrize("mode", MODES)
def test_every_term_is_known_to_the_monitors_and_a_row_that_is_over_gets_nothing(mode: str) -> None:
    results = {"gain", "attribution", "terminal", "escrow"}
    story = Story(RewardConfig(mode=mode), horizon=6)
    story.germinate()
    step = story.finish()
    assert set(step.terms) <= STEERING | results
    assert float(story.wait().total) == 0.0


def test_the_total_is_the_sum_of_the_terms() -> None:
    step = Story(RewardConfig(mode="shaped")).germinate()
    assert float(step.total) == pytest.approx(sum(float(v) for v in step.terms.values()))


def test_a_step_before_any_reset_is_refused() -> None:
    _, (transition, *_) = random_episode(2, 2, 4, generator(0, "early"))
    with pytest.raises(UsageError, match="call reset"):
        make_reward(RewardConfig()).step(transition)


def test_a_memory_of_another_mode_is_refused() -> None:
    first, _ = random_episode(2, 2, 4, generator(0, "other"))
    basic = make_reward(RewardConfig(mode="basic"))
    basic.reset(first)
    with pytest.raises(CheckpointError, match="belongs to the reward 'basic'"):
        make_reward(RewardConfig(mode="twin")).load_state_dict(basic.state_dict())


def test_a_fresh_reward_has_a_state_too() -> None:
    reward = make_reward(RewardConfig())
    reward.load_state_dict(make_reward(RewardConfig()).state_dict())


def test_a_switch_names_what_the_mode_has_instead() -> None:
    with pytest.raises(ConfigError, match=r"\(it has disable_pbrs, disable_terminal_reward\)"):
        make_reward(RewardConfig(mode="loss", disable_anti_gaming=True))


def test_a_mode_of_ones_own_is_a_choice_of_terms() -> None:
    reward = ComposedReward(
        RewardConfig(mode="basic"), {"gain": lambda view: view.after.val_score / 100}
    )
    first, transitions = random_episode(3, 2, 5, generator(0, "own"))
    reward.reset(first)
    paid = reward.step(transitions[0])
    kept = ~transitions[0].after.rolled_back
    assert torch.equal(paid.total, transitions[0].after.val_score / 100 * kept)


def test_a_rollback_leaves_only_what_must_be_settled() -> None:
    settled = {"rollback", "auto_prune", "gain", "pbrs", "clawback", "hindsight", "escrow"}
    first, transitions = random_episode(64, 2, 12, generator(0, "rollbacks"))
    assert any(bool((each.active & each.after.rolled_back).any()) for each in transitions)
    for mode in MODES:
        reward = make_reward(RewardConfig(mode=mode))
        reward.reset(first)
        for transition in transitions:
            step = reward.step(transition)
            bad = transition.active & transition.after.rolled_back
            assert bool((step.terms["rollback"][bad] < 0).all())
            for name in step.terms.keys() - settled:
                assert bool((step.terms[name][bad] == 0).all()), name


@pytest.mark.parametrize("mode", ["basic", "simplified"])
def test_planting_and_pruning_never_pays(mode: str) -> None:
    """Nor in `twin` and `shaped`, which have their own pages of such stories."""
    story = Story(RewardConfig(mode=mode), slots=1)
    for _ in range(2):
        story.germinate()
        story.blend()
        story.prune()
        story.wait(8)
        assert story.sum() < 0
        assert story.sum(gamma=story.config.gamma) < 0


def test_gains_of_basic_add_up_to_the_change_over_the_episode() -> None:
    story = Story(RewardConfig(mode="basic"), horizon=12)
    for points in (3, -5, 10, 1):
        story.score += points
        story.wait()
    story.finish()
    assert close(story.sum("gain"), 5 * 9 / 100)


def test_sparse_pays_nothing_before_the_end_and_then_for_what_stays() -> None:
    story = Story(RewardConfig(mode="sparse"), horizon=20, seed_params=every_seed(50_000))
    story.hold(0)
    story.score = 60
    story.contribution[:] = torch.tensor([[2.0, 4.0]])
    story.wait(2)
    story.fossilize(0)
    story.hold(1)
    assert story.sum() == 0
    # 56 points without the seed that was never fossilized; the fossil is a tenth of the budget.
    assert close(float(story.finish().total), 0.56 - 0.1 * 0.1)


def test_a_reward_that_is_all_terminal_cannot_do_without() -> None:
    with pytest.raises(ConfigError, match="has no ablation disable_terminal_reward"):
        make_reward(RewardConfig(mode="sparse", disable_terminal_reward=True))


def test_simplified_can_do_without_potentials_and_end() -> None:
    bare = RewardConfig(mode="simplified", disable_pbrs=True, disable_terminal_reward=True)
    assert set(Story(bare).wait().terms) == {"action", "rollback"}


ESCROW = RewardConfig(mode="escrow")


def test_escrow_has_the_terms_of_shaped_and_what_is_forfeited() -> None:
    names = set(Story(ESCROW).wait().terms)
    assert names == set(SHAPED_TERMS) | {"escrow"}
    assert not make_reward(ESCROW).needs_twin


def test_in_escrow_growing_and_pruning_never_pays_even_while_the_host_learns() -> None:
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


def test_in_escrow_fossilizing_pays_more_than_holding_on() -> None:
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


def on(device: str, transition: Transition) -> Transition:
    moved = {
        field.name: getattr(transition, field.name).to(device)
        for field in dataclasses.fields(transition)
        if field.name != "actions"
    }
    actions = {head: value.to(device) for head, value in transition.actions.items()}
    return Transition(actions=actions, **moved)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_pays_the_same_and_takes_over_a_memory_from_the_cpu(mode: str) -> None:
    first, transitions = random_episode(32, 3, 20, generator(0, "gpu"))
    here, there = make_reward(RewardConfig(mode=mode)), make_reward(RewardConfig(mode=mode))
    here.reset(first)
    there.reset(first.to("cuda"))
    for index, transition in enumerate(transitions):
        if index == 10:
            there.load_state_dict(here.state_dict())
        expected, paid = here.step(transition), there.step(on("cuda", transition))
        for name, values in paid.terms.items():
            assert values.is_cuda
            assert torch.allclose(values.cpu(), expected.terms[name], rtol=1e-4, atol=1e-4), name
