"""Short ways under `vmap` give what the long ones give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.hosts.cnn import StandardisedConv
from esper.kasmina.hosts.resnet import PreActivationBlock
from esper.kasmina.hosts.transformer import AttentionLayer
from esper.lab.population.vmap_rules import install_vmap_rules


class Halved(nn.GroupNorm):
    """A user's own normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


MODULES: list[nn.Module] = [
    nn.GroupNorm(2, 6),
    nn.GroupNorm(1, 6, affine=False),
    nn.MaxPool2d(2),
    nn.AvgPool2d(2),
    Halved(3, 6),
    nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
    StandardisedConv(6, 4),
    PreActivationBlock(6),
    BLUEPRINTS.get("conv_light").build(6, "cnn"),
    BLUEPRINTS.get("bottleneck").build(6, "cnn"),
]


def run(module: nn.Module, parameters: dict[str, Tensor], x: Tensor, dim: int | None) -> Tensor:
    def one(own: dict[str, Tensor], inputs: Tensor) -> Tensor:
        out: Tensor = functional_call(module, own, (inputs,))
        return out

    out: Tensor = vmap(one, in_dims=(0, dim))(parameters, x)
    return out


@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_values_and_gradients_stay_what_they_were(module: nn.Module, dim: int | None) -> None:
    rows = 3
    plain, short = module.double(), install_vmap_rules(copy.deepcopy(module))
    parameters = {
        name: torch.randn(rows, *p.shape, dtype=torch.float64, requires_grad=True)
        for name, p in plain.named_parameters()
    }
    if not parameters:
        # Something must be different from row to row for there to be rows at all.
        parameters = {"unused": torch.zeros(rows, dtype=torch.float64)}
        if dim is None:
            return
    x = torch.randn(rows, 5, 6, 4, 4, dtype=torch.float64)
    x = (x[0] if dim is None else x.movedim(0, dim)).requires_grad_()
    wanted = [x, *(p for p in parameters.values() if p.requires_grad)]
    results = []
    for one in (plain, short):
        out = run(one, parameters, x, dim)
        results.append((out, torch.autograd.grad(out.square().sum(), wanted)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=1e-12)
    for found, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_outside_of_vmap_nothing_changes() -> None:
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    for module in MODULES:
        short = install_vmap_rules(copy.deepcopy(module.double()))
        assert torch.equal(short(x), module(x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_attention_of_hosts_leaves_vmap(dim: int | None, causal: bool) -> None:
    """Otherwise it would warn, as PyTorch has no rule for it on a CPU."""
    plain = AttentionLayer(6, 2, causal=causal).double()
    short = install_vmap_rules(copy.deepcopy(plain))
    parameters = {
        name: torch.randn(3, *p.shape, dtype=torch.float64, requires_grad=True)
        for name, p in plain.named_parameters()
    }
    x = torch.randn(3, 5, 4, 6, dtype=torch.float64)
    rows = [
        functional_call(
            plain, {k: v[r] for k, v in parameters.items()}, (x[0 if dim is None else r],)
        )
        for r in range(3)
    ]
    out = run(short, parameters, x[0] if dim is None else x.movedim(0, dim), dim)
    torch.testing.assert_close(out, torch.stack(rows), rtol=1e-12, atol=1e-12)
    wanted = list(parameters.values())
    results = (torch.autograd.grad(one.square().sum(), wanted) for one in (out, torch.stack(rows)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_attention_with_dropout_draws_on() -> None:
    layer = AttentionLayer(6, 2, causal=True, dropout=0.5)
    short = install_vmap_rules(copy.deepcopy(layer))
    x = torch.randn(2, 4, 6)
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    assert torch.equal(short(x), expected)


def test_the_kernel_of_convolutions_is_given_standardised_filters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.lab.population.vmap_rules.has_kernels", lambda x: True)
    x = torch.randn(2, 6, 4, 4)
    for conv in (StandardisedConv(6, 4), nn.Conv2d(6, 4, 3, padding=1)):
        short = install_vmap_rules(copy.deepcopy(conv))
        # Outside of `vmap` the kernel's function is PyTorch's convolution.
        monkeypatch.setattr(nn.Conv2d, "forward", None)
        found = short(x)
        monkeypatch.undo()
        assert torch.equal(found, conv(x))


def test_a_pool_that_also_returns_entries_is_left_alone() -> None:
    pool = install_vmap_rules(nn.MaxPool2d(2, return_indices=True))
    values, places = pool(torch.randn(2, 6, 4, 4))
    assert values.shape == places.shape


def test_a_norm_takes_what_follows_it_along_unless_somebody_watches() -> None:
    chain = nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.GroupNorm(3, 6))
    chain, x = chain.double(), torch.randn(2, 6, 4, 4, dtype=torch.float64)
    expected = chain(x)
    short = install_vmap_rules(copy.deepcopy(chain))
    assert torch.equal(short(x), expected)
    seen: list[Tensor] = []
    short[0].register_forward_hook(lambda module, args, out: seen.append(out))
    assert torch.equal(short(x), expected)
    assert torch.equal(seen[0], chain[0](x))
    assert bool((seen[0] < 0).any())


def test_a_residual_branch_is_the_sum_it_was() -> None:
    for name in ("conv_small", "conv_heavy", "depthwise", "bottleneck"):
        branch = BLUEPRINTS.get(name).build(6, "cnn").double()
        with torch.no_grad():
            for parameter in branch.parameters():
                parameter.add_(0.1)
        x = torch.randn(3, 6, 4, 4, dtype=torch.float64)
        torch.testing.assert_close(install_vmap_rules(copy.deepcopy(branch))(x), branch(x))
