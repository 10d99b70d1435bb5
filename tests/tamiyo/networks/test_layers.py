from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.errors import UsageError
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.tamiyo.networks.config import SENTINEL_PRIOR
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.layers import (
    BlueprintEmbedding,
    check_hidden,
    clear_rows,
    empty_hidden,
    make_blueprint_head,
    make_head,
    run_layers,
    run_sequence,
    run_step,
)


@pytest.fixture(params=["two layers", "three layers"])
def layers(request: pytest.FixtureRequest) -> nn.Sequential:
    torch.manual_seed(0)
    make = make_head if request.param == "two layers" else make_blueprint_head
    return make(24, 5)


def gradients(layers: nn.Sequential, x: Tensor, output: Tensor, upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, [x, *layers.parameters()], upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_the_layers(
    layers: nn.Sequential, dtype: torch.dtype
) -> None:
    layers = layers.to(dtype)
    x = torch.randn(7, 3, 24, dtype=dtype, requires_grad=True)
    upstream = torch.randn(7, 3, 5, dtype=dtype)
    got, wanted = run_layers(layers, x), layers(x)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        gradients(layers, x, got, upstream), gradients(layers, x, wanted, upstream)
    )


def test_inputs_and_gradients_may_have_gaps(layers: nn.Sequential) -> None:
    wide = torch.randn(3, 7, 30, requires_grad=True)
    x = wide.transpose(0, 1)[..., 3:27]
    upstream = torch.randn(7, 3, 9)[..., 2:7]
    got, wanted = run_layers(layers, x), layers(x)
    torch.testing.assert_close(
        gradients(layers, wide, got, upstream), gradients(layers, wide, wanted, upstream)
    )


def test_an_input_without_gradient_gets_none(layers: nn.Sequential) -> None:
    x = torch.randn(4, 24)
    run_layers(layers, x).sum().backward()
    assert x.grad is None
    assert all(weight.grad is not None for weight in layers.parameters())


def test_nothing_is_written_over(layers: nn.Sequential) -> None:
    x, upstream = torch.randn(4, 24, requires_grad=True), torch.randn(4, 5)
    before = x.detach().clone(), upstream.clone()
    run_layers(layers, x).backward(upstream)
    assert torch.equal(x, before[0])
    assert torch.equal(upstream, before[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(layers: nn.Sequential, bad: float) -> None:
    x = torch.randn(3, 24)
    x[1, 4] = bad
    output = run_layers(layers, x)
    assert torch.isfinite(output[[0, 2]]).all()
    assert not torch.isfinite(output[1]).all()


def test_weights_that_changed_before_the_backward_pass_are_refused(layers: nn.Sequential) -> None:
    output = run_layers(layers, torch.randn(3, 24, requires_grad=True))
    with torch.no_grad():
        for weight in layers.parameters():
            weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_empty_slots_have_the_last_row() -> None:
    embedding = BlueprintEmbedding()
    rows = embedding(torch.tensor([[-1, 0, 12]]))
    assert rows.shape == (1, 3, 4)
    weight = embedding.embedding.weight
    assert weight.shape == (NUM_BLUEPRINTS + 1, 4)
    assert torch.equal(rows[0], weight[[NUM_BLUEPRINTS, 0, NUM_BLUEPRINTS - 1]])


def test_the_indices_are_left_as_they_are() -> None:
    indices = torch.tensor([-1, 2])
    BlueprintEmbedding()(indices)
    assert indices.tolist() == [-1, 2]


def test_the_null_index_is_a_buffer_but_no_weight() -> None:
    embedding = BlueprintEmbedding(20, 3)
    (buffer,) = embedding.buffers()
    assert buffer.dtype == torch.int64
    assert int(buffer) == 20
    assert embedding.null_idx is buffer
    assert list(embedding.state_dict()) == ["embedding.weight"]


def test_rows_start_small() -> None:
    weight = BlueprintEmbedding(500, 8).embedding.weight
    assert 0.018 < float(weight.detach().std()) < 0.022


def test_empty_slots_learn_too() -> None:
    embedding = BlueprintEmbedding()
    embedding(torch.tensor([-1])).sum().backward()
    assert embedding.embedding.weight.grad is not None
    assert embedding.embedding.weight.grad[NUM_BLUEPRINTS].abs().sum() > 0
    assert embedding.embedding.weight.grad[:NUM_BLUEPRINTS].abs().sum() == 0


def gain(weight: Tensor) -> float:
    """Return the scale of an orthogonal matrix, or fail if it is not one."""
    values = torch.linalg.svdvals(weight.detach())
    assert float(values.min()) == pytest.approx(float(values.max()), rel=1e-4)
    return float(values.mean())


@pytest.fixture(scope="module")
def net() -> FactoredRecurrentActorCriticV2:
    torch.manual_seed(0)
    return FactoredRecurrentActorCriticV2(lstm_hidden_dim=64, lstm_layers=2)


def test_hidden_layers_have_gain_sqrt_two(net: FactoredRecurrentActorCriticV2) -> None:
    hidden = [net.feature_net[0], net.blueprint_head[0], net.blueprint_head[2], net.value_head[0]]
    hidden += [head[0] for head in net.heads]
    for layer in hidden:
        assert gain(layer.weight) == pytest.approx(math.sqrt(2), rel=1e-4)
        assert (layer.bias == 0).all()


def test_output_layers(net: FactoredRecurrentActorCriticV2) -> None:
    for head in net.heads:
        assert gain(head[-1].weight) == pytest.approx(0.01, rel=1e-4)
        if head is not net.op_head:
            assert (head[-1].bias == 0).all()
    assert net.op_head[-1].bias.tolist() == list(SENTINEL_PRIOR)
    assert gain(net.value_head[-1].weight) == pytest.approx(1.0, rel=1e-4)
    assert (net.value_head[-1].bias == 0).all()


def test_the_memory_is_orthogonal_with_an_effective_forget_bias_of_one(
    net: FactoredRecurrentActorCriticV2,
) -> None:
    for w_input, w_hidden, b_input, b_hidden in net.lstm.all_weights:
        assert gain(w_input) == pytest.approx(1.0, rel=1e-4)
        assert gain(w_hidden) == pytest.approx(1.0, rel=1e-4)
        effective = (b_input + b_hidden).detach().chunk(4)
        for index, gate in enumerate(effective):
            assert (gate == (1.0 if index == 1 else 0.0)).all()


def test_gains_and_prior_are_configuration() -> None:
    prior = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    net = FactoredRecurrentActorCriticV2(
        lstm_hidden_dim=32, policy_gain=0.5, value_gain=0.1, initial_op_bias=prior
    )
    assert gain(net.slot_head[-1].weight) == pytest.approx(0.5, rel=1e-4)
    assert gain(net.value_head[-1].weight) == pytest.approx(0.1, rel=1e-4)
    assert net.op_head[-1].bias.tolist() == list(prior)
    assert isinstance(net.lstm_ln, nn.LayerNorm)


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
