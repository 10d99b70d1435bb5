import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.randomness import generator
from esper.simic.rewards import RewardConfig
from esper.simic.rewards.memory import start_memory
from esper.simic.rewards.view import StepView
from esper.testing import random_episode


def view_of_first_step() -> StepView:
    first, transitions = random_episode(32, 3, 6, generator(0, "view"))
    memory = start_memory(first, final_epochs=5, keeps_boosts=False)
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
