"""The mathematics of mixing a seed in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.slot import GateNetwork, blend, blend_per_sample, straight_through
from esper.leyline.slots import Topology
from esper.leyline.stages import AlphaAlgorithm

SHAPES: dict[Topology, tuple[int, ...]] = {
    "cnn": (3, 4, 5, 5),
    "sequence": (3, 5, 4),
    "vector": (3, 4),
}
ALGORITHMS = list(AlphaAlgorithm)


def pair(topology: Topology = "vector") -> tuple[Tensor, Tensor, nn.Module]:
    shape = SHAPES[topology]
    return torch.randn(shape), torch.randn(shape), GateNetwork(4, topology)


def test_the_formulas() -> None:
    h, s, gate = pair()
    a = torch.tensor(0.3)
    torch.testing.assert_close(blend(h, s, a, AlphaAlgorithm.ADD), 0.7 * h + 0.3 * s)
    torch.testing.assert_close(
        blend(h, s, a, AlphaAlgorithm.MULTIPLY), h * (1 + 0.3 * torch.tanh(s - h))
    )
    torch.testing.assert_close(
        blend(h, s, a, AlphaAlgorithm.GATE, gate), h + 0.3 * gate(h) * (s - h)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("topology", list(SHAPES))
def test_a_seed_equal_to_the_host_changes_nothing(
    algorithm: AlphaAlgorithm, topology: Topology
) -> None:
    h, _, gate = pair(topology)
    assert torch.equal(blend(h, h.clone(), torch.tensor(1.0), algorithm, gate), h)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("topology", list(SHAPES))
def test_samples_at_alpha_zero_are_the_host_to_the_bit(
    algorithm: AlphaAlgorithm, topology: Topology
) -> None:
    h, s, gate = pair(topology)
    # A seed that has gone mad must not reach the samples it is switched off for.
    s[0] = torch.nan
    out = blend_per_sample(h, s, torch.tensor([0.0, 0.5, 1.0]), algorithm, gate)
    assert torch.equal(out[0], h[0])
    for index, alpha in ((1, 0.5), (2, 1.0)):
        rows = slice(index, index + 1)
        expected = blend(h[rows], s[rows], torch.tensor(alpha), algorithm, gate)
        torch.testing.assert_close(out[rows], expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_result_has_the_precision_of_the_host(algorithm: AlphaAlgorithm) -> None:
    h, s, gate = pair()
    gate = gate.to(torch.bfloat16)
    half = h.to(torch.bfloat16)
    assert blend(half, s, torch.tensor(0.5), algorithm, gate).dtype == torch.bfloat16


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_gradients_reach_host_and_seed_at_every_amplitude(
    algorithm: AlphaAlgorithm, alpha: float
) -> None:
    h, _, gate = pair()
    h.requires_grad_()
    seed = nn.Linear(4, 4)
    blend(h, seed(h), torch.tensor(alpha), algorithm, gate).square().sum().backward()
    assert h.grad is not None
    assert bool(h.grad.any())
    assert all(bool(p.grad.any()) for p in seed.parameters())


@pytest.mark.parametrize("topology", list(SHAPES))
def test_a_gate_is_between_zero_and_one_and_broadcasts(topology: Topology) -> None:
    h, _, gate = pair(topology)
    opening = gate(h)
    assert bool(((opening > 0) & (opening < 1)).all())
    shapes = {"cnn": (3, 1, 1, 1), "sequence": (3, 5, 1), "vector": (3, 1)}
    assert opening.shape == shapes[topology]
    assert (opening * h).shape == h.shape


def test_a_gate_on_a_sequence_does_not_see_the_future() -> None:
    h, _, gate = pair("sequence")
    changed = h.clone()
    changed[:, 3:] += 5
    assert torch.equal(gate(changed)[:, :3], gate(h)[:, :3])


@pytest.mark.parametrize(("channels", "hidden"), [(4, 8), (32, 8), (64, 16)])
def test_the_gate_is_a_quarter_as_wide_and_at_least_eight(channels: int, hidden: int) -> None:
    count = sum(p.numel() for p in GateNetwork(channels, "cnn").parameters())
    assert count == channels * hidden + hidden + hidden + 1


def test_straight_through_has_the_value_of_one_and_gradients_for_both() -> None:
    h = torch.randn(3, requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    out = straight_through(h, b)
    assert torch.equal(out, h)
    out.square().sum().backward()
    assert torch.equal(h.grad, 2 * h)
    assert torch.equal(b.grad, 2 * h)


def test_straight_through_keeps_madness_out() -> None:
    h = torch.randn(3, requires_grad=True)
    b = torch.full((3,), torch.nan, requires_grad=True)
    out = straight_through(h, b)
    assert torch.equal(out, h)
    out.sum().backward()
    assert torch.equal(h.grad, torch.ones(3))


def test_what_follows_straight_through_may_work_in_place() -> None:
    h = torch.randn(3, requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    inner = h * 1
    out = straight_through(inner, b * 1)
    before = inner.detach().clone()
    torch.relu_(out).sum().backward()
    assert torch.equal(inner.detach(), before)
    assert torch.equal(h.grad, (before > 0).float())
    assert torch.equal(b.grad, (before > 0).float())


def test_straight_through_can_be_differentiated_twice_and_mapped() -> None:
    h, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    out = straight_through(h, b).pow(3).sum()
    (first,) = torch.autograd.grad(out, h, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), h)
    torch.testing.assert_close(second, 6 * h)
    assert torch.equal(torch.vmap(straight_through)(h, b), h)
