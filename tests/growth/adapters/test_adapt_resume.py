"""Resuming adapters: what a state holds, and which states and optimizers are refused."""

from __future__ import annotations

import pytest
import torch

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
