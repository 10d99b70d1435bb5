"""A slot: what it does to the host's activation in each of its modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.kasmina.slot import GateNetwork, Slot, SlotMode, blend
from esper.leyline.errors import SlotError
from esper.leyline.stages import AlphaAlgorithm

X = torch.randn(3, 4)


def slot(
    mode: SlotMode, algorithm: AlphaAlgorithm = AlphaAlgorithm.ADD, alpha: float = 0.5
) -> Slot:
    made = Slot("a", "BC", (2, 4))
    made.seed = nn.Linear(4, 4)
    made.gate = GateNetwork(4, "vector")
    made.mode, made.algorithm = int(mode), int(algorithm)
    made.alpha.fill_(alpha)
    return made


def test_an_empty_slot_returns_the_very_same_tensor() -> None:
    empty = Slot("a", "BC", (2, 4))
    assert empty(X) is X
    assert empty.attend(nn.Identity(), (X,), {}, X) is None
    empty.mode = int(SlotMode.BLEND)
    assert empty(X) is X


def test_passing_leaves_the_host_alone_even_with_a_seed() -> None:
    made = slot(SlotMode.PASS)
    assert made(X) is X
    assert made.attend(nn.Identity(), (X,), {}, X) is None


@pytest.mark.parametrize("algorithm", list(AlphaAlgorithm))
def test_blending_mixes_by_the_algorithm_at_the_amplitude(algorithm: AlphaAlgorithm) -> None:
    made = slot(SlotMode.BLEND, algorithm)
    expected = blend(X, made.seed(X), torch.tensor(0.5), algorithm, made.gate)
    assert torch.equal(made(X), expected)
    assert torch.equal(made.attend(nn.Identity(), (X,), {}, X), expected)


@pytest.mark.parametrize("algorithm", list(AlphaAlgorithm))
def test_isolation_has_the_host_s_value_and_the_seed_learns_the_full_blend(
    algorithm: AlphaAlgorithm,
) -> None:
    made = slot(SlotMode.ISOLATE, algorithm, alpha=0.0)
    h = X.clone().requires_grad_()
    out = made(h)
    assert torch.equal(out, X)
    weight = torch.randn(3, 4)
    (out * weight).sum().backward()
    assert torch.equal(h.grad, weight)
    learned = [p.grad.clone() for p in made.seed.parameters()]
    made.zero_grad()
    full = blend(X, made.seed(X), torch.tensor(1.0), algorithm, made.gate)
    (full * weight).sum().backward()
    for gradient, parameter in zip(learned, made.seed.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_further_arguments_of_an_isolated_copy_get_no_gradient_from_it() -> None:
    """A copy is called with what its block is called with, such as a condition of the host's."""
    made = slot(SlotMode.ISOLATE, alpha=0.0)
    made.seed, made.copies = nn.Bilinear(4, 4, 4), 1
    h, condition = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    made.attend(nn.Identity(), (X, condition), {}, h).sum().backward()
    assert torch.equal(h.grad, torch.ones(3, 4))
    assert made.seed.weight.grad.abs().sum() > 0
    assert condition.grad is None


def test_isolation_costs_nothing_where_nothing_can_be_learned() -> None:
    made = slot(SlotMode.ISOLATE)
    with torch.no_grad():
        assert made(X) is X
    assert made.eval()(X) is X
    made.train().is_straight_through = False
    assert made(X) is X


def test_a_shadowing_slot_is_fully_blended_and_lets_gradients_through() -> None:
    made = slot(SlotMode.ISOLATE, alpha=0.0)
    made.is_shadowing = True
    h = X.clone().requires_grad_()
    expected = blend(h, made.seed(h), torch.tensor(1.0), AlphaAlgorithm.ADD)
    assert torch.equal(made(h), expected)
    made(h).sum().backward()
    assert bool(h.grad.any())


def test_amplitudes_per_sample_win_over_the_slot_s_own() -> None:
    made = slot(SlotMode.BLEND, alpha=0.5)
    made.sample_alphas = torch.tensor([0.0, 0.5, 1.0])
    out = made(X)
    assert torch.equal(out[0], X[0])
    torch.testing.assert_close(out[1], (X[1] + made.seed(X)[1]) / 2)
    torch.testing.assert_close(out[2], made.seed(X)[2])
    made.sample_alphas = torch.tensor([0.0])
    assert torch.equal(made(X), X)


def test_amplitudes_for_another_batch_size_are_refused() -> None:
    made = slot(SlotMode.BLEND)
    made.sample_alphas = torch.tensor([0.0, 1.0])
    with pytest.raises(SlotError, match="slot 'a' got 3 samples where 2 were announced"):
        made(X)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 5), torch.zeros(2, 1, 4), torch.zeros(4)])
def test_an_activation_of_another_kind_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(SlotError, match=r"made for activations like \[2, 4\]"):
        slot(SlotMode.BLEND)(wrong)


@pytest.mark.parametrize(
    ("axes", "shape", "channels"),
    [("BCHW", (2, 3, 5, 6), 3), ("TBC", (2, 5, 3), 3), ("BCL", (2, 5, 3), 3), ("BC", (2, 3), 3)],
)
def test_the_width_is_read_from_the_channel_axis(
    axes: str, shape: tuple[int, ...], channels: int
) -> None:
    assert Slot("a", axes, shape).channels == channels  # type: ignore[arg-type]


def test_image_sizes_and_sequence_lengths_may_vary() -> None:
    made = Slot("a", "BCHW", (2, 4, 5, 5))
    made.seed, made.mode = nn.Conv2d(4, 4, 1), int(SlotMode.BLEND)
    assert made(torch.zeros(3, 4, 7, 9)).shape == (3, 4, 7, 9)


def test_a_printed_slot_says_what_it_is_and_saves_no_amplitude() -> None:
    made = Slot("stem", "BC", (2, 4))
    assert repr(made) == "Slot('stem', BC, channels=4)"
    assert not made.state_dict()
