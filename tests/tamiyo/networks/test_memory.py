from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.leyline.errors import UsageError
from esper.tamiyo.networks.memory import (
    check_hidden,
    clear_rows,
    empty_hidden,
    run_sequence,
    run_step,
)


@pytest.fixture(params=[1, 3], ids=["one layer", "three layers"])
def lstm(request: pytest.FixtureRequest) -> nn.LSTM:
    return nn.LSTM(6, 6, request.param, batch_first=True)


def test_steps_equal_the_sequence(lstm: nn.LSTM) -> None:
    features = torch.randn(4, 10, 6)
    outputs, last = run_sequence(lstm, features, None)
    hidden = empty_hidden(lstm, 4)
    for at in range(10):
        output, hidden = run_step(lstm, features[:, at], hidden)
        torch.testing.assert_close(output, outputs[:, at])
    for now, then in zip(hidden, last, strict=True):
        torch.testing.assert_close(now, then)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_boundaries_equal_a_loop_that_forgets(lstm: nn.LSTM, density: float) -> None:
    features = torch.randn(5, 12, 6)
    starts = torch.rand(5, 12) < density
    before = (torch.randn(lstm.num_layers, 5, 6), torch.randn(lstm.num_layers, 5, 6))
    outputs, last = run_sequence(lstm, features, before, starts)
    hidden = before
    for at in range(12):
        hidden = clear_rows(hidden, starts[:, at])
        output, hidden = run_step(lstm, features[:, at], hidden)
        torch.testing.assert_close(output, outputs[:, at])
    for now, then in zip(hidden, last, strict=True):
        torch.testing.assert_close(now, then)


def test_no_gradient_crosses_a_boundary(lstm: nn.LSTM) -> None:
    features = torch.randn(2, 6, 6, requires_grad=True)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 3] = True
    outputs, _ = run_sequence(lstm, features, None, starts)
    outputs[:, -1].sum().backward()
    assert features.grad is not None
    assert (features.grad[0, :3] == 0).all()
    assert (features.grad[0, 3:].abs().sum(-1) > 0).all()
    assert (features.grad[1].abs().sum(-1) > 0).all()


def test_clearing_leaves_other_rows_and_the_original() -> None:
    hidden = (torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    state, cell = clear_rows(hidden, torch.tensor([False, True, False]))
    for part in (state, cell):
        assert (part[:, 1] == 0).all()
        assert (part[:, [0, 2]] == 1).all()
    assert (hidden[0] == 1).all()


def test_shapes_are_checked(lstm: nn.LSTM) -> None:
    with pytest.raises(UsageError, match="layers, rows, width"):
        check_hidden(empty_hidden(lstm, 2), lstm, 3)
    with pytest.raises(UsageError, match=r"episode_starts must be bool \[2, 3\]"):
        run_sequence(lstm, torch.randn(2, 3, 6), None, torch.zeros(3, 2, dtype=torch.bool))
