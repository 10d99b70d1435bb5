"""The one distribution: what is sampled is what is scored, whatever the mask and the floor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.controller import PROBABILITY_FLOOR_PER_HEAD
from esper.leyline.errors import ConfigError, EmptyMaskError, NonFiniteError, UsageError
from esper.tamiyo.policy.distribution import (
    MASKED_LOGIT,
    MIN_LOG_PROB,
    FloorConfig,
    check_choices,
    chosen_log_probs,
    entropy,
    exploration_kl,
    masked_log_probs,
    masked_log_softmax,
    must_check,
    probabilities,
    sample,
)

KINDS = ("mixture", "clamp", "off")


def random_heads(rows: int, heads: int, choices: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return logits and masks [rows, heads, choices]; every mask allows something."""
    logits = scale * torch.randn(rows, heads, choices)
    mask = torch.rand(rows, heads, choices) < 0.6
    mask.scatter_(-1, torch.randint(choices, (rows, heads, 1)), True)
    return logits, mask


def softmax_by_hand(logits: list[float], mask: list[bool]) -> list[float]:
    weights = [math.exp(z) if legal else 0.0 for z, legal in zip(logits, mask, strict=True)]
    return [weight / sum(weights) for weight in weights]


def clamp_by_hand(probs: list[float], mask: list[bool], floor: float) -> list[float]:
    """Raise to the floor and rescale the rest, again and again until nothing is below."""
    least = min(floor, 0.99 / sum(mask))
    raised: set[int] = set()
    while True:
        rest = sum(p for i, p in enumerate(probs) if mask[i] and i not in raised)
        scale = (1.0 - least * len(raised)) / rest
        low = {i for i, p in enumerate(probs) if mask[i] and i not in raised and p * scale < least}
        if not low:
            return [
                least if i in raised else (p * scale if mask[i] else 0.0)
                for i, p in enumerate(probs)
            ]
        raised |= low


# ---------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_sum_to_one_and_are_zero_where_masked(kind: str) -> None:
    logits, mask = random_heads(200, 8, 13)
    probs = probabilities(masked_log_probs(logits, mask, 0.05, floor_kind=kind))
    torch.testing.assert_close(probs.sum(-1), torch.ones(200, 8))
    assert (probs[~mask] == 0).all()
    assert (probs[mask] > 0).all()


def test_softmax_matches_plain_arithmetic() -> None:
    logits, mask = random_heads(30, 3, 5)
    probs = probabilities(masked_log_probs(logits, mask, floor_kind="off"))
    for row, head in itertools.product(range(30), range(3)):
        wanted = softmax_by_hand(logits[row, head].tolist(), mask[row, head].tolist())
        assert probs[row, head].tolist() == pytest.approx(wanted, abs=1e-6)


def test_mixture_matches_its_formula() -> None:
    logits, mask = random_heads(50, 8, 13)
    floors = torch.tensor([PROBABILITY_FLOOR_PER_HEAD[head] for head in HEAD_NAMES])
    probs = probabilities(masked_log_probs(logits, mask, floors))
    k = mask.sum(-1, keepdim=True)
    least = torch.minimum(floors[:, None], 0.5 / k)
    wanted = ((1 - least * k) * masked_log_softmax(logits, mask).exp() + least) * mask
    torch.testing.assert_close(probs, wanted)
    assert (probs >= least - 1e-6)[mask].all()


def test_seven_blueprints_take_half_of_the_mass() -> None:
    mask = torch.ones(7, dtype=torch.bool)
    logits = torch.tensor([50.0, 0, 0, 0, 0, 0, 0])
    probs = probabilities(masked_log_probs(logits, mask, 0.10))
    assert probs[1:].tolist() == pytest.approx([0.5 / 7] * 6)
    assert float(probs[0]) == pytest.approx(0.5 + 0.5 / 7)


@given(
    st.lists(st.tuples(st.floats(-20, 20), st.booleans()), min_size=1, max_size=9),
    st.floats(0.0, 0.6),
)
def test_clamp_matches_plain_arithmetic(cells: list[tuple[float, bool]], floor: float) -> None:
    logits, mask = [z for z, _ in cells], [legal for _, legal in cells]
    mask[0] = True
    log_probs = masked_log_probs(
        torch.tensor(logits), torch.tensor(mask), floor, floor_kind="clamp"
    )
    wanted = clamp_by_hand(softmax_by_hand(logits, mask), mask, floor)
    assert probabilities(log_probs).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_floor_of_zero_is_no_floor(kind: str) -> None:
    logits, mask = random_heads(20, 8, 6, scale=60.0)
    plain = masked_log_probs(logits, mask, floor_kind="off")
    for nothing in (0.0, torch.zeros(8)):
        zero = masked_log_probs(logits, mask, nothing, floor_kind=kind)
        # Below that, a mixture is less than the smallest number of its type.
        torch.testing.assert_close(zero.clamp(min=-87.0), plain.clamp(min=-87.0))


def test_log_probs_are_clamped_and_finite() -> None:
    logits = torch.tensor([0.0, -500.0, 1e6])
    log_probs = masked_log_probs(logits, torch.tensor([True, True, False]), floor_kind="off")
    assert log_probs.tolist() == [0.0, MIN_LOG_PROB, MIN_LOG_PROB]


def test_legal_choices_far_below_the_masked_logit_stay_legal() -> None:
    logits = torch.tensor([-3e4, 0.0, -3e4])
    mask = torch.tensor([True, False, True])
    for kind in KINDS:
        probs = probabilities(masked_log_probs(logits, mask, 0.01, floor_kind=kind))
        assert probs.tolist() == pytest.approx([0.5, 0.0, 0.5])
    assert float(masked_log_softmax(logits, mask)[1]) == MASKED_LOGIT


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits, mask = random_heads(5, 8, 13)
    log_probs = masked_log_probs(logits.bfloat16(), mask, 0.02)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, masked_log_probs(logits.bfloat16().float(), mask, 0.02))


def test_an_unknown_kind_of_floor_is_refused() -> None:
    with pytest.raises(UsageError, match="'mixture', 'clamp' or 'off'"):
        masked_log_probs(torch.zeros(2), torch.ones(2, dtype=torch.bool), floor_kind="soft")


# --------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_draws_are_legal_and_follow_the_scored_probabilities(kind: str) -> None:
    logits, mask = random_heads(1, 8, 13)
    floors = torch.tensor([PROBABILITY_FLOOR_PER_HEAD[head] for head in HEAD_NAMES])
    log_probs = masked_log_probs(logits, mask, floors, floor_kind=kind)
    draws = 1_000_000 // 8
    choices = sample(log_probs.expand(draws, 8, 13), torch.Generator().manual_seed(1))
    assert mask[0].expand(draws, 8, 13).gather(-1, choices[..., None]).all()
    for head in range(8):
        legal = mask[0, head]
        if legal.sum() < 2:
            continue
        counts = torch.bincount(choices[:, head], minlength=13)[legal].double()
        expected = draws * log_probs[0, head][legal].double().exp()
        enough = expected >= 5
        expected, counts = expected[enough], counts[enough]
        expected *= counts.sum() / expected.sum()
        assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_the_ends_of_the_unit_interval_fall_on_legal_choices() -> None:
    mask = torch.tensor(list(itertools.product([False, True], repeat=5))[1:])
    log_probs = masked_log_probs(torch.randn(31, 5), mask, 0.02)
    legal = [row.nonzero().flatten().tolist() for row in mask]
    for dtype in (torch.float32, torch.float64):
        last = torch.nextafter(torch.ones(31, dtype=dtype), torch.zeros(31, dtype=dtype))
        first = sample(log_probs, uniforms=torch.zeros(31, dtype=dtype))
        assert first.tolist() == [choices[0] for choices in legal]
        assert sample(log_probs, uniforms=last).tolist() == [choices[-1] for choices in legal]
    # A draw of double precision may round to 1.
    assert sample(log_probs, uniforms=last.float()).tolist() == [choices[-1] for choices in legal]


def test_impossible_choices_are_never_drawn_though_their_log_prob_is_finite() -> None:
    log_probs = masked_log_probs(
        torch.tensor([-300.0, 0.0, 0.0]), torch.tensor([True, False, True]), floor_kind="off"
    )
    draws = torch.linspace(0, 1, 1001)[:-1]
    assert (sample(log_probs.expand(1000, 3), uniforms=draws) == 2).all()


def test_draws_are_the_inverse_of_the_cumulated_mass() -> None:
    log_probs = torch.tensor([0.2, 0.5, 0.3]).log()
    draws = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.99])
    assert sample(log_probs.expand(6, 3), uniforms=draws).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_same_generator_gives_the_same_draws() -> None:
    logits, mask = random_heads(50, 8, 13)
    log_probs = masked_log_probs(logits, mask)
    one, two = (sample(log_probs, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one, two)
    assert one.dtype == torch.int64


def test_deterministic_takes_the_likeliest() -> None:
    logits, mask = random_heads(50, 8, 13)
    best = torch.where(mask, logits, -torch.inf).argmax(-1)
    for kind in KINDS:
        log_probs = masked_log_probs(logits, mask, 0.001, floor_kind=kind)
        assert torch.equal(sample(log_probs, deterministic=True), best)
        torch.testing.assert_close(chosen_log_probs(log_probs, best), log_probs.amax(-1))


# -------------------------------------------------------------------------- entropy, exploration


def test_entropy_is_normalised_by_the_legal_choices() -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert entropy(torch.zeros(2, 4), mask).tolist() == pytest.approx([1.0, 1.0])
    probs = torch.tensor([0.5, 0.25, 0.25])
    nats = float(-(probs * probs.log()).sum())
    value = entropy(torch.cat([probs.log(), torch.tensor([9.0])]), mask[0])
    assert float(value) == pytest.approx(nats / math.log(3))


def test_entropy_of_a_single_legal_choice_is_zero_without_gradient() -> None:
    logits = torch.randn(4, requires_grad=True)
    value = entropy(logits, torch.tensor([False, True, False, False]))
    value.backward()
    assert value.item() == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_entropy_has_no_floor_and_a_finite_gradient_at_collapse() -> None:
    logits = torch.tensor([200.0, 0.0, 0.0], requires_grad=True)
    value = entropy(logits, torch.ones(3, dtype=torch.bool))
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("gap", [0.0, 1.0, 20.0, 200.0])
def test_exploration_gradient_is_pi_minus_uniform(gap: float) -> None:
    logits = torch.tensor([gap, 0.0, 0.0, 5.0], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    exploration_kl(logits, mask).backward()
    wanted = (logits.detach()[:3].softmax(-1) - 1 / 3).tolist()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([*wanted, 0.0], abs=1e-6)
    if gap >= 20.0:
        assert (logits.grad[:3].abs() >= 0.1).all()


def test_floored_probabilities_have_lost_their_gradient_where_exploration_has_not() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    for kind in ("mixture", "clamp"):
        logits = torch.tensor([20.0, 0.0, 0.0], requires_grad=True)
        masked_log_probs(logits, mask, 0.05, floor_kind=kind)[1].backward()
        assert logits.grad is not None
        assert (logits.grad.abs() < 1e-3).all()


def test_exploration_is_the_kl_from_uniform() -> None:
    logits, mask = random_heads(40, 8, 6)
    log_probs = masked_log_softmax(logits, mask)
    k = mask.sum(-1, keepdim=True)
    terms = torch.where(mask, (1 / k) * (-k.log() - log_probs), 0.0)
    torch.testing.assert_close(exploration_kl(logits, mask), terms.sum(-1))
    assert (exploration_kl(logits, mask) >= -1e-6).all()
    single = exploration_kl(torch.randn(3), torch.tensor([False, True, False]))
    assert float(single) == pytest.approx(0.0, abs=1e-6)


def test_gradients_are_those_of_the_formulas() -> None:
    logits, mask = random_heads(20, 8, 6)
    weights = torch.randn(20, 8, 6)
    k = mask.sum(-1, keepdim=True).double()
    least = (0.5 / k).clamp(max=0.03)

    def formula(z: Tensor) -> Tensor:
        probs = torch.where(mask, z, -torch.inf).softmax(-1)
        nats = -torch.where(mask, probs * torch.where(mask, probs, 1.0).log(), 0.0).sum(-1)
        total = torch.where(k[..., 0] > 1, nats / k[..., 0].clamp(min=2).log(), 0.0).sum()
        mixed = torch.where(mask, (1 - least * k) * probs + least, 1.0)
        return total + (weights.double() * mixed.log()).sum()

    def ours(z: Tensor) -> Tensor:
        log_probs = torch.where(mask, masked_log_probs(z, mask, 0.03), 0.0)
        return entropy(z, mask).sum() + (weights * log_probs).sum()

    exact, own = logits.double().requires_grad_(), logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(formula(exact), exact)
    (got,) = torch.autograd.grad(ours(own), own)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------- checks


def test_an_empty_mask_is_named() -> None:
    logits, mask = random_heads(4, 8, 5)
    mask[2, 1] = False
    with pytest.raises(EmptyMaskError, match="row 2, head 'blueprint' allows no choice"):
        masked_log_probs(logits, mask, heads=HEAD_NAMES)
    episodes = torch.ones(2, 4, 8, 5, dtype=torch.bool)
    episodes[1, 3, 7] = False
    with pytest.raises(EmptyMaskError, match="row 1, step 3, head 'op'"):
        check_choices(torch.zeros(2, 4, 8, 5), episodes, HEAD_NAMES)
    with pytest.raises(EmptyMaskError, match="row 3 allows"):
        check_choices(torch.zeros(4, 2), torch.tensor([[True, True]] * 3 + [[False, False]]))
    with pytest.raises(EmptyMaskError, match="the only row allows"):
        masked_log_probs(torch.zeros(2), torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_named(value: float) -> None:
    logits, mask = random_heads(4, 8, 5)
    logits[1, 7, 0] = value
    with pytest.raises(NonFiniteError, match="row 1, head 'op' has a logit that is not finite"):
        masked_log_probs(logits, mask, heads=HEAD_NAMES)


def test_huge_but_finite_logits_pass() -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    assert torch.isfinite(masked_log_probs(torch.full((4, 3), 3e38), mask)).all()


def test_the_check_can_be_turned_off_but_not_while_debugging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = torch.zeros(2, dtype=torch.bool)
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    assert torch.isfinite(masked_log_probs(torch.zeros(2), mask, check=False)).all()
    assert not must_check(False, mask)
    monkeypatch.setenv("ESPER_DEBUG", "1")
    with pytest.raises(EmptyMaskError):
        masked_log_probs(torch.zeros(2), mask, check=False)


def test_rows_without_a_choice_do_not_spoil_the_others() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    log_probs = masked_log_probs(logits, mask, 0.05, check=False)
    (log_probs[0, 0] + entropy(logits, mask)[0] + exploration_kl(logits, mask)[0]).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[1] == 0).all()


def test_floors_are_configured_by_head() -> None:
    config = FloorConfig()
    wanted = [PROBABILITY_FLOOR_PER_HEAD[head] for head in HEAD_NAMES]
    assert list(config.by_head()) == wanted
    assert config.kind == "mixture"
    with pytest.raises(ConfigError, match=r"FloorConfig\.op must be"):
        FloorConfig(op=1.5)
    with pytest.raises(ConfigError, match=r"FloorConfig\.kind must be one of"):
        FloorConfig(kind="soft")
