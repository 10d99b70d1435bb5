from __future__ import annotations

import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import CheckpointError
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.contract import Memory, StepView, start_memory
from esper.testing import random_episode, random_signals
from esper.utils.randomness import generator
from tests.simic.rewards.stories import Story, detail


def view_of_first_step() -> StepView:
    first, transitions = random_episode(32, 3, 6, generator(0, "view"))
    memory = start_memory(first, keeps_boosts=False)
    return StepView(transitions[0], memory, RewardConfig())


def test_a_value_is_computed_once_per_step() -> None:
    calls = []

    def compute(view: StepView) -> int:
        calls.append(view)
        return 7

    view = view_of_first_step()
    assert [view.once(compute), view.once(compute)] == [7, 7]
    assert len(calls) == 1


def test_what_was_done_is_at_its_slot() -> None:
    view = view_of_first_step()
    germinated = view.did(LifecycleOp.GERMINATE)
    assert bool(germinated.any())
    assert torch.equal(germinated, view.has_module & ~view.had_module)
    waited = view.op == int(LifecycleOp.WAIT)
    assert not bool(germinated[waited].any())


def test_the_mean_is_over_live_seeds_and_nothing_without_them() -> None:
    view = view_of_first_step()
    view.__dict__["live"] = torch.tensor([[True, True, False], [False] * 3]).repeat(16, 1)
    values = torch.tensor([[1.0, 3.0, torch.nan], [torch.nan] * 3]).repeat(16, 1)
    assert torch.equal(view.mean_over_live(values), torch.tensor([2.0, 0.0]).repeat(16))


def test_there_is_no_change_before_the_first_epoch() -> None:
    assert torch.equal(view_of_first_step().last_change, torch.zeros(32))


COUNTS = ("seeds_germinated", "seeds_fossilized", "seeds_contributing", "seeds_pruned")


def test_a_memory_starts_empty_and_survives_its_state() -> None:
    first, _ = random_episode(3, 2, 7, generator(0, "memory"))
    memory = start_memory(first, keeps_boosts=True)
    assert memory.boosts.shape == (3, 2, 2, int(first.max_epochs.max()) + 1)
    assert bool(memory.score_first.isnan().all())
    again = Memory.from_state_dict(memory.state_dict())
    assert again.state_dict().keys() == memory.state_dict().keys()
    assert torch.equal(again.first_slot, memory.first_slot)


def test_only_modes_with_a_ledger_have_room_for_one() -> None:
    first, _ = random_episode(3, 2, 7, generator(0, "memory"))
    assert start_memory(first, keeps_boosts=False).boosts.numel() == 0


def test_seeds_that_are_there_at_the_start_improve_from_there_on() -> None:
    signals, _ = random_signals(64, 3, generator(0, "grown"))
    memory = start_memory(signals, keeps_boosts=False)
    known = ~memory.score_first.isnan()
    assert bool(known.any())
    assert torch.equal(memory.score_first[known], signals.val_score[:, None].expand(64, 3)[known])
    assert bool(memory.score_before.isnan().all())


def test_a_state_of_another_version_is_refused() -> None:
    first, _ = random_episode(1, 1, 3, generator(0, "memory"))
    state = start_memory(first, keeps_boosts=False).state_dict()
    state["surprise"] = state.pop("gain")
    with pytest.raises(CheckpointError, match="lacks gain and also has surprise"):
        Memory.from_state_dict(state)


@pytest.mark.parametrize("mode", ["twin", "shaped"])
def test_counters_count_deeds_and_start_again_with_an_episode(mode: str) -> None:
    story = Story(RewardConfig(mode=mode), slots=3)
    story.prune()  # refused: nothing to prune
    assert [detail(story.steps[-1], name) for name in COUNTS] == [0, 0, 0, 0]
    story.hold(0)
    story.hold(1)
    story.score, story.contribution[:] = 52, torch.tensor([[2.0, -1.0, 0.0]])
    story.wait()
    story.fossilize(0)
    story.fossilize(1)
    story.germinate(2)
    assert [detail(story.steps[-1], name) for name in COUNTS] == [3, 2, 1, 0]
    story.prune(2)
    assert [detail(story.wait(), name) for name in COUNTS] == [3, 2, 1, 1]
    story.reward.reset(story.world.reset(50.0))
    story.signals = story.world.signals()
    assert [detail(story.wait(), name) for name in COUNTS] == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", ["twin", "shaped"])
def test_a_slow_prune_counts_when_the_seed_is_gone(mode: str) -> None:
    story = Story(RewardConfig(mode=mode), slots=1)
    story.hold()
    assert detail(story.prune(speed=1), "seeds_pruned") == 0
    assert detail(story.wait(2), "seeds_pruned") == 1
