"""The shadow pass: the seed learns on its true loss, and the rest as if nothing had happened."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.garden import Garden
from esper.kasmina.slot import SlotMode
from esper.leyline.errors import UsageError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import STYLES, Stack, bring, quick_config, stack_garden, stir

X, Y = torch.randn(6, 4), torch.randn(6, 4)


def loss(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("style", STYLES)
def test_value_and_host_gradients_are_those_of_the_host_alone(style: str) -> None:
    garden = stack_garden(training_mode="shadow")
    alone = Stack()
    alone.load_state_dict(garden.model.state_dict())
    bring(garden, "b", SeedStage.TRAINING, style=style)
    stir(garden, "b")
    value = garden.training_loss(loss)
    value.backward()
    expected = loss(alone)
    expected.backward()
    assert torch.equal(value, expected)
    for inside, outside in zip(gradients(garden.model), gradients(alone), strict=True):
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("style", STYLES)
def test_the_seed_learns_what_it_would_learn_at_full_amplitude(style: str) -> None:
    garden = stack_garden(training_mode="shadow")
    bring(garden, "b", SeedStage.TRAINING, style=style)
    stir(garden, "b")
    garden.training_loss(loss).backward()
    learned = gradients(garden.seedbed)
    garden.zero_grad()
    slot = garden.seedbed[1]
    slot.mode = int(SlotMode.BLEND)
    slot.alpha.fill_(1.0)
    loss(garden).backward()
    for shadow, real in zip(learned, gradients(garden.seedbed), strict=True):
        assert torch.equal(shadow, real)


def test_other_blended_seeds_learn_as_if_there_were_no_shadow() -> None:
    def other_gradients(*, with_trainee: bool) -> list[Tensor | None]:
        garden = stack_garden(training_mode="shadow")
        bring(garden, "a", SeedStage.HOLDING, style="gated_gate")
        if with_trainee:
            bring(garden, "b", SeedStage.TRAINING)
        garden.training_loss(loss).backward()
        return gradients(garden.seedbed[0])

    alone, beside = other_gradients(with_trainee=False), other_gradients(with_trainee=True)
    assert len(alone) == 8
    for one, two in zip(alone, beside, strict=True):
        assert torch.equal(one, two)


class Noisy(nn.Module):
    """Statistics and randomness that a second pass could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.a(x)))
        return out


def test_statistics_and_random_numbers_are_as_if_there_were_no_shadow() -> None:
    torch.manual_seed(3)
    host = Noisy()
    alone = copy.deepcopy(host)
    garden = Garden(host, ["a"], X, config=quick_config(training_mode="shadow"))
    bring(garden, "a", SeedStage.TRAINING)
    stir(garden, "a")
    torch.manual_seed(5)
    for _ in range(3):
        expected = loss(alone)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(3):
        value = garden.training_loss(loss)
    assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), after)
    for inside, outside in zip(host.buffers(), alone.buffers(), strict=True):
        assert torch.equal(inside, outside)


def test_a_seed_that_has_gone_mad_does_not_reach_the_host() -> None:
    garden = stack_garden(training_mode="shadow")
    alone = stack_garden()
    bring(garden, "b", SeedStage.TRAINING)
    with torch.no_grad():
        for parameter in garden.slot_parameters("b"):
            parameter.fill_(torch.inf)
    value = garden.training_loss(loss)
    value.backward()
    expected = loss(alone)
    expected.backward()
    assert torch.equal(value, expected)
    for inside, outside in zip(gradients(garden.model), gradients(alone.model), strict=True):
        assert torch.equal(inside, outside)


def test_a_closure_that_ignores_its_model_is_refused() -> None:
    garden = stack_garden(training_mode="shadow")
    bring(garden, "b", SeedStage.TRAINING)
    with pytest.raises(UsageError, match="closure must call the model it is given"):
        garden.training_loss(lambda model: loss(garden))


def test_there_is_no_second_pass_where_nothing_trains_in_the_shadow() -> None:
    calls: list[nn.Module] = []

    def counted(model: nn.Module) -> Tensor:
        calls.append(model)
        return loss(model)

    garden = stack_garden(training_mode="shadow")
    garden.training_loss(counted)
    bring(garden, "a", SeedStage.HOLDING)
    garden.training_loss(counted)
    bring(garden, "b", SeedStage.TRAINING)
    garden.eval()
    garden.training_loss(counted)
    garden.train()
    with torch.no_grad():
        garden.training_loss(counted)
    straight = stack_garden()
    bring(straight, "b", SeedStage.TRAINING)
    straight.training_loss(counted)
    assert calls == [garden, garden, garden, garden, straight]
    garden.training_loss(counted)
    assert len(calls) == 7


def test_a_failing_closure_leaves_the_slot_as_it_was() -> None:
    garden = stack_garden(training_mode="shadow")
    bring(garden, "b", SeedStage.TRAINING)

    def fails(model: nn.Module) -> Tensor:
        if model is garden:
            return loss(model)
        model(torch.randn(6, 9))
        raise AssertionError("not reached")

    with pytest.raises(RuntimeError):
        garden.training_loss(fails)
    assert not garden.seedbed[1].is_shadowing


def test_tied_weights_are_frozen_under_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.body = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(self.body(self.first(x))))
            return out

    torch.manual_seed(2)
    garden = Garden(Tied(), ["body"], X, config=quick_config(training_mode="shadow"))
    loss(garden).backward()
    expected = gradients(garden.model)
    garden.zero_grad()
    bring(garden, "body", SeedStage.TRAINING)
    stir(garden, "body")
    garden.training_loss(loss).backward()
    for inside, outside in zip(gradients(garden.model), expected, strict=True):
        assert torch.equal(inside, outside)
