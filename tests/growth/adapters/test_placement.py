"""Budgets go to the components that promise most for their parameters, and are never exceeded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.growth.adapters.placement import (
    AdaptConfig,
    Offer,
    Planner,
    allocate,
    gains_of,
    leading,
)
from esper.growth.adapters.weights import AdaptedWeight
from esper.leyline.errors import ConfigError

OFFERS = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.builds(
        Offer,
        st.lists(st.floats(0, 1e6), max_size=6).map(lambda gains: sorted(gains, reverse=True)),
        st.integers(1, 50),
    ),
)


@given(OFFERS, st.integers(0, 500))
def test_a_budget_is_never_exceeded_and_nothing_that_fits_is_left(
    offers: dict[str, Offer], budget: int
) -> None:
    counts = allocate(offers, budget)
    left = budget - sum(offers[name].cost * count for name, count in counts.items())
    assert left >= 0
    for name, count in counts.items():
        promising = sum(gain > 0 for gain in offers[name].gains)
        assert count <= promising
        assert count == promising or offers[name].cost > left


def test_the_best_gain_per_parameter_comes_first() -> None:
    offers = {"wide": Offer([9.0, 8.0], 10), "narrow": Offer([2.0, 0.5], 1)}
    assert allocate(offers, 11) == {"wide": 1, "narrow": 1}
    assert allocate(offers, 21) == {"wide": 2, "narrow": 1}


def test_pairs_that_train_both_matrices_start_with_the_even_rank() -> None:
    torch.manual_seed(0)
    own = weights((100, 100), (100, 100))
    planner = Planner(own, 1_000, AdaptConfig(), 0)
    started = planner.start()
    assert {name: len(rows) for name, rows in started.items()} == {"0": 2, "1": 2}
    torch.testing.assert_close(started["0"].norm(dim=1), torch.full((2,), 1.5))
    for name, rows in started.items():
        own[name].pair.A = nn.Parameter(rows)
    # What is left of the budget goes where the gradients ask for it, once.
    gradients = {"0": 100.0 * torch.randn(100, 100), "1": torch.randn(100, 100)}
    chosen, _ = planner.plan(gradients, 4, is_first=True)
    assert {name: len(rows) for name, rows in chosen.items()} == {"0": 1, "1": 0}
    assert planner.plan(gradients, 50, is_first=False)[0] == {}


def test_a_weight_that_trains_one_matrix_gets_its_share_of_parameters_not_of_rank() -> None:
    torch.manual_seed(0)
    own = weights((20, 100), (400, 400))
    planner = Planner(own, 3_000, AdaptConfig(most=1.0), 0)
    assert [one.pair.trained for one in own.values()] == [("B",), ("A", "B")]
    assert {name: len(rows) for name, rows in planner.start().items()} == {"1": 3}
    gradients = {name: torch.randn(one.rows, one.columns) for name, one in own.items()}
    chosen, _ = planner.plan(gradients, 4, is_first=True)
    # 3,000 parameters for 120 and 800 a rank are 3.26 ranks of both: 391 parameters of the first.
    assert len(chosen["0"]) == round(391 / 20)


def test_leading_directions_are_those_of_the_gradient() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 7)
    gradient = 5.0 * torch.outer(torch.randn(4), one) + torch.outer(torch.randn(4), other)
    rows = leading(gradient, 3, "w")
    assert rows.shape == (2, 7)
    torch.testing.assert_close(rows @ rows.T, torch.eye(2))
    both = torch.linalg.qr(torch.stack([one, other]).T).Q
    torch.testing.assert_close(rows @ both @ both.T, rows, rtol=1e-4, atol=1e-5)
    gains = gains_of(gradient, rows)
    torch.testing.assert_close(gains, (gradient @ rows.T).abs().sum(0))
    torch.testing.assert_close(gains_of(gradient, 3.0 * rows), gains)


def test_large_gradients_are_decomposed_at_random_but_always_alike() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(520, 3) @ torch.randn(3, 530)
    state = torch.get_rng_state()
    rows = leading(gradient, 3, "w")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(leading(gradient, 3, "w"), rows)
    torch.testing.assert_close(gradient @ rows.T @ rows, gradient, rtol=1e-3, atol=1e-3)


def weights(*shapes: tuple[int, int]) -> dict[str, AdaptedWeight]:
    found = {}
    for number, (rows, columns) in enumerate(shapes):
        layer = nn.Linear(columns, rows)
        found[str(number)] = AdaptedWeight(str(number), layer, "weight", "linear", 1.0)
    return found


def test_a_pair_trains_one_matrix_where_it_covers_enough_of_the_weight() -> None:
    own = weights((20, 60), (60, 20), (400, 400))
    Planner(own, 3_000, AdaptConfig(), 0)
    assert [one.pair.trained for one in own.values()] == [("B",), ("A",), ("A", "B")]
    assert [one.cost for one in own.values()] == [20, 20, 800]
    assert not own["0"].pair.A.requires_grad
    assert not own["1"].pair.B.requires_grad


def test_a_thin_matrix_does_not_train_alone() -> None:
    own = weights((2, 60), (20, 60))
    Planner(own, 400, AdaptConfig(), 0)
    assert [one.pair.trained for one in own.values()] == [("A", "B"), ("B",)]


def test_both_matrices_train_where_one_could_not_use_the_budget() -> None:
    own = weights((16, 20), (17, 20))
    Planner(own, 700, AdaptConfig(), 0)
    assert [one.pair.trained for one in own.values()] == [("A", "B"), ("B",)]
    own = weights((16, 20), (17, 20))
    Planner(own, 10_000, AdaptConfig(), 0)
    assert [one.pair.trained for one in own.values()] == [("A", "B"), ("A", "B")]


def test_ranks_follow_gradients_up_to_a_limit() -> None:
    torch.manual_seed(0)
    own = weights((10, 10), (10, 10), (10, 10))
    planner = Planner(own, 120, AdaptConfig(most=1.5), 0)
    gradients = {"0": 100.0 * torch.randn(10, 10), "1": torch.randn(10, 10)}
    chosen, asked = planner.plan(gradients, 4, is_first=True)
    assert {name: len(rows) for name, rows in chosen.items()} == {"0": 6, "1": 6}
    assert asked["0"] > 0.95
    assert "2" not in chosen
    for rows in chosen.values():
        torch.testing.assert_close(rows.norm(dim=1), torch.full((6,), 0.4))


def test_weights_exceed_their_limit_where_much_of_the_budget_would_be_left() -> None:
    """One component of the last weight costs more than the whole budget."""
    torch.manual_seed(0)
    own = weights((8, 9), (16, 72), (10, 600))
    planner = Planner(own, 300, AdaptConfig(), 0)
    assert [one.cost for one in own.values()] == [8, 16, 610]
    gradients = {name: torch.randn(one.rows, one.columns) for name, one in own.items()}
    chosen, _ = planner.plan(gradients, 4, is_first=True)
    counts = {name: len(rows) for name, rows in chosen.items()}
    assert 270 < sum(own[name].cost * count for name, count in counts.items()) <= 300
    assert counts["0"] <= 8
    assert counts["2"] == 0
    # Only singular directions that exist are opened, and each of them once.
    for name in ("0", "1"):
        unit = chosen[name] / 0.4
        torch.testing.assert_close(unit @ unit.T, torch.eye(counts[name]), rtol=1e-4, atol=1e-4)


def test_a_weight_whose_gradient_is_not_finite_gets_nothing() -> None:
    own = weights((10, 10), (10, 10))
    planner = Planner(own, 100, AdaptConfig(), 0)
    gradients = {"0": torch.full((10, 10), float("nan")), "1": torch.randn(10, 10)}
    assert list(planner.plan(gradients, 4, is_first=True)[0]) == ["1"]


@pytest.mark.parametrize("moves", [(0.0,), (0.5, 1.0), (-0.1,)])
def test_moves_are_shares_of_the_run(moves: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"AdaptConfig\.moves"):
        AdaptConfig(moves=moves)
