from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.tamiyo.networks.dense import run_layers
from esper.tamiyo.networks.heads import make_blueprint_head, make_head


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
