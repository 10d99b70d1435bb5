"""Averages of a growing network's weights, by the class PyTorch has for them."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.kasmina.garden import Garden
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import Stack, bring, quick_config, same_state, stack_garden, stir

X = torch.randn(5, 4)
DECAY = 0.9


def averaged(garden: nn.Module, **options: Any) -> AveragedModel:
    return AveragedModel(garden, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **options)


def inner(average: AveragedModel) -> Garden:
    garden = average.module
    assert isinstance(garden, Garden)
    return garden


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_follows_a_whole_life(use_buffers: bool) -> None:
    garden = stack_garden(lifecycle={"rules": {"min_prune_age": 0}})
    ema = averaged(garden, use_buffers=use_buffers)
    expected = {name: p.detach().clone() for name, p in garden.named_parameters()}

    def move() -> None:
        """One step of training, and the average as it is meant, by name."""
        with torch.no_grad():
            for parameter in garden.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        first = bool(ema.n_averaged == 0)
        for name, parameter in garden.named_parameters():
            now = parameter.detach().clone()
            expected[name] = now if first else expected[name].lerp(now, 1 - DECAY)
        ema.update_parameters(garden)

    def check() -> None:
        assert dict(inner(ema).named_parameters()).keys() == dict(garden.named_parameters()).keys()
        for name, parameter in inner(ema).named_parameters():
            torch.testing.assert_close(parameter, expected[name], msg=name)
        assert same_state(inner(ema).state, garden.state)

    def begin(slot: str) -> None:
        for name, parameter in garden.named_parameters():
            if name.startswith(f"seedbed.slots.{garden.slot_names.index(slot)}."):
                expected[name] = parameter.detach().clone()

    move()
    # The later slot first: by position its seed would move when another comes before it.
    for slot in ("c", "a"):
        assert garden.germinate(slot, "mlp_small", tempo=2, style="gated_gate")
        begin(slot)
        for _ in range(2):
            move()
            check()
        for _ in range(2):
            assert garden.advance(slot)
            garden.tick()
            move()
            check()
    while garden.slots["a"].stage is not SeedStage.HOLDING:
        garden.tick()
        garden.advance("a")
    move()
    check()
    assert garden.prune("c")
    for name in [name for name in expected if name.startswith("seedbed.slots.2.")]:
        del expected[name]
    move()
    check()
    # It is the average that is run, with the seed in it.
    with_seed = ema(X)
    inner(ema).seedbed[0].alpha.zero_()
    assert not torch.allclose(with_seed, ema(X))


def test_an_average_of_a_larger_model_follows_too() -> None:
    garden = stack_garden()
    larger = nn.Sequential(garden, nn.Linear(4, 2))
    ema = averaged(larger)
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    ema.update_parameters(larger)
    torch.testing.assert_close(ema(X), larger(X))


def test_weights_of_an_average_are_saved_with_its_seeds() -> None:
    garden = stack_garden()
    ema = averaged(garden)
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    ema.update_parameters(garden)
    ema.update_parameters(garden)
    again = averaged(stack_garden())
    again.load_state_dict(ema.state_dict())
    assert torch.equal(again(X), ema(X))


def test_an_average_of_the_model_alone_is_refused() -> None:
    garden = stack_garden()
    with pytest.raises(SlotError, match="AveragedModel was given a model that grows in a garden"):
        averaged(garden.model)
    assert isinstance(averaged(Stack()).module, Stack)


def test_a_plain_copy_does_not_follow() -> None:
    garden = stack_garden()
    copied = copy.deepcopy(garden)
    bring(garden, "b", SeedStage.HOLDING)
    assert list(copied.slot_parameters("b")) == []
    assert copied.ties.original() is garden


def test_another_kind_of_average_can_follow_by_hand() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    mine = copy.deepcopy(garden)
    mine.follow(garden)
    stir(garden, "b")
    bring(garden, "a", SeedStage.TRAINING)
    assert mine.slots["a"].stage is SeedStage.TRAINING
    # What was there keeps its own weights.
    kept = zip(mine.slot_parameters("b"), garden.slot_parameters("b"), strict=True)
    assert not any(torch.equal(one, other) for one, other in kept)
    other = Garden(Stack(), ["a"], X, config=quick_config())
    for stranger in (mine, other):
        with pytest.raises(UsageError, match="the same slots"):
            mine.follow(stranger)


def test_nobody_is_kept_alive_by_following() -> None:
    garden = stack_garden()
    ema = averaged(garden)
    assert len(list(garden.ties.followers)) == 1
    del ema
    gc.collect()
    assert not list(garden.ties.followers)
    ema = averaged(garden)
    del garden
    gc.collect()
    assert inner(ema).ties.original() is None
    ema(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_of_torchscript_is_refused_by_name() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(UsageError, match=r"the model is compiled by TorchScript"):
        Garden(scripted, ["0"], X)
    with pytest.raises(UsageError, match="'1' of the model is compiled by TorchScript"):
        Garden(nn.Sequential(nn.Linear(4, 4), scripted), ["0"], X)


def test_weights_that_are_not_finite_are_refused_with_their_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight[0, :3] = torch.tensor([math.nan, math.inf, 1.0])
    with pytest.raises(UsageError, match=r"^2 of 16 values of the parameter '0.weight' are not"):
        Garden(model, ["0"], X)
