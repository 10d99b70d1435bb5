"""Rules that choose plans by descriptors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from esper.lab.proof.choose import Ratios, Table
from esper.lab.proof.rules import FITS, SplitRule, fit_nearest, fit_splits, read_rule
from esper.leyline.errors import UsageError


def ratios(*values: float) -> Ratios:
    count = len(values)
    return Ratios(list(range(count)), list(values), list(values), [1.0] * count, [1.0] * count)


PLANS = {
    "wide": ({"epoch": 0, "op": "grow", "slot": 0, "blueprint": "conv_heavy"},),
    "thin": ({"epoch": 0, "op": "grow", "slot": 0, "blueprint": "norm"},),
}


def family(gain: float) -> tuple[Table, dict[str, dict[str, float]]]:
    """Narrow members want the wide seed, noisy ones the thin seed or nothing."""
    table: Table = {}
    places = {}
    for number in range(6):
        noise = float(number >= 3)
        own = (gain, 0.05) if not noise else (-gain, 0.1)
        table[f"m{number}"] = {"wide": ratios(*[own[0]] * 8), "thin": ratios(*[own[1]] * 8)}
        places[f"m{number}"] = {"label_noise": 5 * noise, "slots": 3.0 + 0.1 * number}
    return table, places


def test_a_contextual_rule_tells_tasks_apart_by_their_descriptors() -> None:
    table, places = family(0.4)
    rule = fit_nearest(table, places, PLANS, "val")
    assert rule.choose({"label_noise": 0.0, "slots": 3.0}) == "wide"
    assert rule.choose({"label_noise": 5.0, "slots": 3.0}) == "thin"
    assert rule.held_out == pytest.approx((0.4 + 0.1) / 2)
    assert rule.neighbours < 5


def test_a_contextual_rule_waits_where_nothing_helps_and_survives_its_file() -> None:
    table, places = family(0.4)
    for own in table.values():
        own["thin"] = ratios(*[-0.2] * 8)
    rule = fit_nearest(table, places, PLANS, "val")
    assert rule.choose({"label_noise": 5.0, "slots": 3.0}) is None
    assert rule.plan({"label_noise": 5.0, "slots": 3.0}) is None
    again = read_rule(rule.to_mapping(), "a file")
    assert again == rule
    with pytest.raises(UsageError, match="needs the descriptors slots"):
        again.choose({"label_noise": 5.0})
    with pytest.raises(UsageError, match="holds no rule by descriptors"):
        read_rule([], "a file")


def arena() -> tuple[Table, dict[str, dict[str, float]]]:
    """Short budgets want nothing, long ones depth 4, or 8 if the network is small."""
    table: Table = {}
    places = {}
    for number, steps in enumerate((8.0, 9.0, 10.0, 11.0) * 2):
        is_small = number >= 4
        deeper = (-0.2, -0.4) if steps < 10 else ((0.1, 0.3) if is_small else (0.2, -0.1))
        name = f"{steps:g} {'small' if is_small else 'large'}"
        table[name] = {
            plan: ratios(worth, worth) for plan, worth in zip(("4", "8"), deeper, strict=True)
        }
        places[name] = {"log_budget": steps, "log_parameters": 12.0 - is_small}
    return table, places


DEPTHS = {"4": 4, "8": 8}


def test_one_split_compares_the_descriptor_that_tells_most() -> None:
    table, places = arena()
    rule = fit_splits(table, places, DEPTHS, "val", splits=1)
    assert rule.describe() == "if log_budget > 9.5: 4, otherwise wait"
    assert rule.plan({"log_budget": 9.6, "log_parameters": 3.0}) == 4
    assert rule.plan({"log_budget": 9.5, "log_parameters": 3.0}) is None


def test_two_splits_are_the_best_of_all_trees_with_three_leaves() -> None:
    table, places = arena()
    rule = fit_splits(table, places, DEPTHS, "val", splits=2)
    assert rule.describe() in (
        "if log_budget > 9.5: (if log_parameters > 11.5: 4, otherwise 8), otherwise wait",
        "if log_parameters > 11.5: (if log_budget > 9.5: 4, otherwise wait), otherwise 8",
    )
    chosen = {member: rule.choose(place) for member, place in places.items()}
    assert chosen["11 small"] == "8"
    assert chosen["11 large"] == "4"
    assert chosen["8 small"] is chosen["8 large"] is None
    # Members that were left out are alike to others, so they get the same.
    assert rule.held_out == pytest.approx((0.2 + 0.2 + 0.3 + 0.3) / 8)


def test_the_first_of_two_splits_need_not_pay_alone() -> None:
    # What is best depends on whether both are large or both are small.
    places = {f"{a}{b}": {"a": a, "b": b} for a in (0.0, 1.0) for b in (0.0, 1.0)}
    table: Table = {
        name: {"4": ratios(0.3 if place["a"] == place["b"] == 1.0 else -0.3)}
        for name, place in places.items()
    }
    rule = fit_splits(table, places, {"4": 4}, "val", splits=2)
    assert {name: rule.choose(place) for name, place in places.items()} == {
        "0.00.0": None,
        "0.01.0": None,
        "1.00.0": None,
        "1.01.0": "4",
    }


def test_a_split_that_gains_nothing_is_left_out() -> None:
    places = {str(number): {"a": float(number)} for number in range(4)}
    table: Table = {name: {"4": ratios(0.1), "8": ratios(0.0)} for name in places}
    rule = fit_splits(table, places, DEPTHS, "val", splits=2)
    assert rule.describe() == "4"
    assert rule.held_out == pytest.approx(0.1)
    alone = fit_splits({"m": {"4": ratios(0.1)}}, {"m": {"a": 1.0}}, {"4": 4}, "val", splits=1)
    assert (alone.describe(), alone.held_out) == ("4", pytest.approx(0.1))


def test_held_out_members_say_what_luck_is_worth() -> None:
    draw = np.random.default_rng(0)
    fitted, held_out = [], []
    for _ in range(8):
        places = {f"m{n}": {"a": draw.normal(), "b": draw.normal()} for n in range(10)}
        table: Table = {
            member: {plan: ratios(draw.normal(0, 0.1)) for plan in "wxyz"} for member in places
        }
        rule = fit_splits(table, places, {plan: [] for plan in "wxyz"}, "val", splits=2)
        held_out.append(rule.held_out)
        for member, place in places.items():
            plan = rule.choose(place)
            fitted.append(0.0 if plan is None else table[member][plan].mean("val"))
    assert np.mean(fitted) > 0.05
    assert abs(np.mean(held_out)) < 0.02


def test_only_plans_that_were_played_everywhere_are_chosen() -> None:
    table, places = arena()
    del table["11 large"]["4"]
    for fit in FITS.values():
        assert list(fit(table, places, DEPTHS, "val").plans) == ["8"]


@pytest.mark.parametrize("name", FITS)
def test_every_rule_survives_its_file(name: str) -> None:
    table, places = arena()
    for plans in (DEPTHS, {"4": PLANS["wide"], "8": PLANS["thin"]}):
        rule = FITS[name](table, places, plans, "val")
        again = read_rule(json.loads(json.dumps(rule.to_mapping())), "a file")
        assert again == rule
        assert [again.plan(place) for place in places.values()] == [
            rule.plan(place) for place in places.values()
        ]


def test_files_that_hold_no_rule() -> None:
    table, places = arena()
    rule = fit_splits(table, places, DEPTHS, "val", splits=1)
    assert isinstance(rule, SplitRule)
    with pytest.raises(UsageError, match="needs the descriptors log_budget; run the search again"):
        rule.choose({"log_parameters": 2.0})
    broken = rule.to_mapping()
    del broken["tree"]["below"]
    with pytest.raises(UsageError, match="a file is not a whole rule: 'below'"):
        read_rule(broken, "a file")
    with pytest.raises(UsageError, match=r"a file is not a whole rule: .*colour"):
        read_rule({**rule.to_mapping(), "colour": 1}, "a file")
