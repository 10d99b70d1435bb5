from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from esper.tamiyo.networks.config import SENTINEL_PRIOR
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2


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
