"""What seeds are worth, against values worked out by hand and with numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.contribution import (
    FACTORIAL_LIMIT,
    Contributions,
    Estimate,
    estimate_contributions,
    participating,
    plan_ablations,
    record_contributions,
    values_in_points,
)
from esper.kasmina.state import empty_state
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import one_slot
from tests.plots import contribution_tensors

NAMES = ("a", "b", "c", "d", "e")


def estimate(f: dict[str, list[float]], members: list[bool]) -> Contributions:
    """Estimate from f(set of seeds) per sample; a set is written as 'ab'."""
    plan = plan_ablations(members)
    rows = []
    for row in plan.tolist():
        on = [NAMES[i] for i, member in enumerate(members) if member and row[i]]
        rows.append(f["".join(on)])
    values = torch.tensor(rows, dtype=torch.float64)
    return estimate_contributions(plan, values, members, NAMES[: len(members)])


TWO = {
    "": [0.0, 0.0, 100.0, 0.0],
    "a": [100.0, 0.0, 100.0, 0.0],
    "b": [0.0, 100.0, 0.0, 0.0],
    "ab": [100.0, 100.0, 100.0, 100.0],
}


def test_two_seeds_by_hand() -> None:
    result = estimate(TWO, [True, True])
    assert result.score.value == 100.0
    assert result.all_off.value == 75.0
    assert result.leave_one_out["a"].value == 75.0
    assert result.leave_one_out["b"].value == 50.0
    assert result.solo_on["a"].value == 25.0
    assert result.solo_on["b"].value == 0.0
    # With exactly two seeds the pair is the network as it is.
    assert result.pairs["a", "b"].value == 75.0
    assert result.interactions["a", "b"].value == 100 - 50 - 25 + 25
    assert result.shapley["a"].value == (25.0 + 75.0) / 2
    assert result.shapley["b"].value == (0.0 + 50.0) / 2


def test_errors_are_those_of_paired_means() -> None:
    result = estimate(TWO, [True, True])
    f = {name: np.array(values) for name, values in TWO.items()}

    def error(differences: np.ndarray) -> float:
        return float(differences.std(ddof=1) / math.sqrt(len(differences)))

    assert result.score.se == pytest.approx(0.0)
    assert result.all_off.se == pytest.approx(error(f["ab"] - f[""]))
    assert result.leave_one_out["a"].se == pytest.approx(error(f["ab"] - f["b"]))
    assert result.solo_on["b"].se == pytest.approx(error(f["b"] - f[""]))
    assert result.interactions["a", "b"].se == pytest.approx(
        error(f["ab"] - f["a"] - f["b"] + f[""])
    )
    shapley = (f["a"] - f[""] + f["ab"] - f["b"]) / 2
    assert result.shapley["a"].se == pytest.approx(error(shapley))


def test_one_sample_has_no_error() -> None:
    result = estimate({"": [1.0], "a": [3.0]}, [True])
    assert result.leave_one_out["a"].value == 2.0
    assert math.isnan(result.leave_one_out["a"].se)


def test_without_seeds_there_is_only_the_score() -> None:
    result = estimate({"": [1.0, 3.0]}, [False, False])
    assert (result.score.value, result.all_off.value) == (2.0, 0.0)
    assert not result.leave_one_out
    assert not result.interactions


def test_one_seed_is_worth_the_same_in_every_way() -> None:
    result = estimate({"": [1.0, 3.0], "b": [2.0, 8.0]}, [False, True])
    for mapping in (result.leave_one_out, result.solo_on, result.shapley):
        assert set(mapping) == {"b"}
        assert mapping["b"].value == 3.0
    assert result.all_off.value == 3.0


def test_three_seeds_have_every_pair_interaction() -> None:
    generator = np.random.default_rng(1)
    f = {
        "".join(chosen): generator.normal(size=50).tolist()
        for size in range(4)
        for chosen in itertools.combinations("abc", size)
    }
    result = estimate(f, [True, True, True])
    mean = {name: float(np.mean(values)) for name, values in f.items()}
    assert set(result.interactions) == {("a", "b"), ("a", "c"), ("b", "c")}
    for one, two in result.interactions:
        wanted = mean[one + two] - mean[one] - mean[two] + mean[""]
        assert result.interactions[one, two].value == pytest.approx(wanted)
        assert result.pairs[one, two].value == pytest.approx(mean[one + two] - mean[""])


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_shapley_values_share_out_exactly_what_all_seeds_give(count: int, key: int) -> None:
    generator = np.random.default_rng(key)
    f = {
        "".join(chosen): generator.normal(size=5).tolist()
        for size in range(count + 1)
        for chosen in itertools.combinations(NAMES[:count], size)
    }
    result = estimate(f, [True] * count)
    total = sum(value.value for value in result.shapley.values())
    assert total == pytest.approx(result.all_off.value, abs=1e-9)
    # Against the definition: the mean marginal over all orders.
    means = {name: float(np.mean(values)) for name, values in f.items()}
    orders = list(itertools.permutations(NAMES[:count]))
    for seed in NAMES[:count]:
        marginals = []
        for order in orders:
            before = "".join(sorted(order[: order.index(seed)]))
            marginals.append(means["".join(sorted(before + seed))] - means[before])
        assert result.shapley[seed].value == pytest.approx(float(np.mean(marginals)), abs=1e-9)


def test_five_seeds_have_no_shapley_values_but_everything_else() -> None:
    plan = plan_ablations([True] * 5)
    values = torch.randn(len(plan), 6, dtype=torch.float64)
    result = estimate_contributions(plan, values, [True] * 5, NAMES)
    assert not result.shapley
    assert len(result.interactions) == 10
    assert set(result.leave_one_out) == set(result.solo_on) == set(NAMES)


def test_values_are_points_of_accuracy_or_negative_losses() -> None:
    loss = torch.tensor([0.5, 2.0])
    assert values_in_points(loss, torch.tensor([True, False])).tolist() == [100.0, 0.0]
    assert values_in_points(loss, None).tolist() == [-0.5, -2.0]


def test_an_estimate_reads_as_points_and_error() -> None:
    assert str(Estimate(1.234, 0.056)) == "+1.23 ± 0.06"


def test_tensors_hold_what_was_measured_and_nan_elsewhere() -> None:
    result = estimate(TWO, [True, True])
    worth, error, interaction = contribution_tensors(result, ("b", "x", "a"))
    assert worth[0, [0, 2]].tolist() == [50.0, 75.0]
    assert bool(worth[0, 1].isnan())
    assert bool(error[0, 1].isnan())
    assert interaction[0].tolist() == [[0, 0, 50.0], [0, 0, 0], [50.0, 0, 0]]


def test_velocity_smooths_changes_from_the_second_measurement_on() -> None:
    state = one_slot(SeedStage.BLENDING)
    here, error = torch.tensor([[True]]), torch.tensor([[0.5]], dtype=torch.float64)
    seen = []
    for value in (2.0, 3.0, 3.0):
        worth = torch.tensor([[value]], dtype=torch.float64)
        state = record_contributions(state, here, worth, error, torch.zeros(1, 1, 1).double())
        seen.append(float(state.contribution_velocity))
    assert seen == pytest.approx([0.0, 0.3, 0.21])
    assert (float(state.contribution), float(state.contribution_se)) == (3.0, 0.5)
    assert int(state.counterfactual_age) == 0


def test_a_measurement_replaces_every_interaction_and_touches_only_its_members() -> None:
    members = torch.tensor([[True, False]])
    state = empty_state(1, 2).where(torch.tensor([[True, True]]), contribution=9.0)
    state = record_contributions(
        state,
        members,
        torch.ones(1, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
        torch.full((1, 2, 2), 4.0, dtype=torch.float64),
    )
    assert state.contribution.tolist() == [[1.0, 9.0]]
    assert state.interaction.tolist() == [[[4, 4], [4, 4]]]


@pytest.mark.parametrize("stage", list(SeedStage))
def test_only_blended_seeds_take_part_and_fossils_when_asked_for(stage: SeedStage) -> None:
    blended = stage in (SeedStage.BLENDING, SeedStage.HOLDING)
    at_full = one_slot(stage, alpha=1.0)
    has_module = bool(at_full.has_module)
    fossil = stage is SeedStage.FOSSILIZED
    assert bool(participating(at_full, fossils=True)) == has_module
    assert bool(participating(at_full)) == (has_module and not fossil)
    if blended:
        assert not bool(participating(one_slot(stage, alpha=0.0), fossils=True))


@pytest.mark.parametrize(("seeds", "configurations"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16)])
def test_up_to_four_seeds_have_every_subset(seeds: int, configurations: int) -> None:
    plan = plan_ablations([True] * seeds + [False])
    assert plan.shape == (configurations, seeds + 1)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_configurations_are_distinct_start_with_all_on_and_leave_others_alone(
    members: list[bool],
) -> None:
    plan = plan_ablations(members)
    rows = [tuple(row) for row in plan.tolist()]
    assert len(set(rows)) == len(rows)
    assert bool(plan[0].all())
    for index, member in enumerate(members):
        assert member or bool(plan[:, index].all())
    assert tuple(not member for member in members) in rows


def test_beyond_four_seeds_pairs_solos_and_leave_one_out_suffice() -> None:
    count = FACTORIAL_LIMIT + 2
    sizes = plan_ablations([True] * count).sum(1).tolist()
    expected = {count: 1, count - 1: count, 2: math.comb(count, 2), 1: count, 0: 1}
    assert {size: sizes.count(size) for size in set(sizes)} == expected


def test_a_plan_is_a_copy() -> None:
    plan = plan_ablations([True, False])
    plan.zero_()
    assert torch.equal(plan_ablations([True, False]), torch.tensor([[1, 1], [0, 1]]).bool())
