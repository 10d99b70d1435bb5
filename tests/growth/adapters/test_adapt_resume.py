"""Resuming adapters: what a state holds, and which states and optimizers are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from esper.growth.adapters.adapt import Adapt
from esper.growth.adapters.placement import AdaptConfig
from esper.leyline.errors import CheckpointError, UsageError
from tests.growth.adapters.test_adapt import adamw, make, train


@pytest.mark.parametrize("stop", [2, 8])
def test_an_optimizer_that_was_not_given_to_load_state_dict_is_refused(stop: int) -> None:
    first = Adapt(make(), 500)
    optimizer = adamw(first)
    train(first, optimizer, 0, stop)
    adapters = Adapt(make(), 500)
    early = adamw(adapters)
    adapters.load_state_dict(first.state_dict())
    early.load_state_dict(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"lacks \d+ parameters.*load_state_dict\(state, optim"):
        train(adapters, early, stop, stop + 1)
    late = adamw(adapters)
    late.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in adapters.parameters()]
    train(adapters, late, stop, stop + 1)
    assert any(
        not torch.equal(p, old) for p, old in zip(adapters.parameters(), before, strict=True)
    )


def test_a_state_of_other_settings_is_refused_where_they_matter() -> None:
    """With other matrices trained, a loaded state could exceed the budget."""
    placed = Adapt(make(), 500)
    train(placed, adamw(placed), 0, 6)
    early = Adapt(make(), 500)
    moving = Adapt(make(), 500, total_steps=40)
    train(moving, adamw(moving), 0, 6)
    for before, config, told in (
        (placed, AdaptConfig(scale=2.0), r"scale=1\.0, but .* config=esper\.AdaptConfig\(scale=1"),
        (placed, AdaptConfig(coverage=5.0), r"A and B in this Adapt; give .*coverage=0\.2"),
        (early, AdaptConfig(measure_steps=5), "made with measure_steps=4"),
        (moving, AdaptConfig(idle=0.5), r"made with idle=0\.01"),
    ):
        adapters = Adapt(make(), 500, config=config)
        start = [p.detach().clone() for p in adapters.parameters()]
        with pytest.raises(CheckpointError, match=told) as caught:
            adapters.load_state_dict(before.state_dict())
        assert "\n" not in str(caught.value)
        assert all(torch.equal(p, q) for p, q in zip(adapters.parameters(), start, strict=True))
    # All ranks are placed, so how they would be placed does not matter any more.
    Adapt(make(), 500, config=AdaptConfig(measure_steps=5)).load_state_dict(placed.state_dict())


def test_a_state_of_another_version_is_refused_by_name() -> None:
    state = Adapt(make(), 500).state_dict()
    del state["config"]
    with pytest.raises(CheckpointError, match=r"another version of Esper \('config' is missing\)"):
        Adapt(make(), 500).load_state_dict(state)


class Normed(nn.Module):
    """A frozen BatchNorm and one in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(81, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.head = nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)))


@pytest.mark.filterwarnings("ignore:the parameters of 'body.1' are frozen")
def test_running_statistics_are_part_of_a_state() -> None:
    torch.manual_seed(0)
    model = Normed()
    fresh = copy.deepcopy(model)
    first = Adapt(model, 500, trainable="head")
    optimizer = adamw(first)
    start = first.state_dict()
    train(first, optimizer, 0, 8)
    adapters = Adapt(fresh, 500, trainable="head")
    adapters.load_state_dict(first.state_dict())
    other = adamw(adapters)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, buffer in model.named_buffers():
        assert torch.equal(fresh.get_buffer(name), buffer), name
    assert train(adapters, other, 8, 12) == train(first, optimizer, 8, 12)
    first.load_state_dict(start)
    assert torch.equal(model.body[1].running_mean, torch.zeros(20))
    state = first.state_dict()
    state["buffers"]["head.0.running_mean"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"head\.0\.running_mean is \[3\] in this state"):
        first.load_state_dict(state)
