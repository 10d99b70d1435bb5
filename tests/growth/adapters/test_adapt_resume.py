"""Resuming adapters: what a state holds, and which states and optimizers are refused."""

from __future__ import annotations

import pytest
import torch

from esper.growth.adapters.adapt import Adapt
from esper.leyline.errors import UsageError
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
