from __future__ import annotations

import math

import numpy as np
import pytest

from esper.lab.proof.choose import (
    Ratios,
    Table,
    best_by_likeness,
    best_by_member,
    best_single,
    choose_few,
    measure_headroom,
    most_played,
    read_table,
    shrunk,
)
from esper.lab.proof.rules import fit_nearest
from esper.leyline.errors import UsageError
from tests.lab.proof.made_up import result


def ratios(*values: float) -> Ratios:
    count = len(values)
    return Ratios(list(range(count)), list(values), list(values), [1.0] * count, [1.0] * count)


def test_log_ratios_are_paired_with_the_waiting_network_of_the_same_seed() -> None:
    results = [
        result("wait", "m", errors=[0.4, 0.2], purpose="rung 0"),
        result("a", "m", errors=[0.2, 0.2], purpose="rung 0"),
        result("wait", "m", errors=[0.1], purpose="rung 1", seeds=[7]),
        result("a", "m", errors=[0.2], purpose="rung 1", seeds=[7]),
    ]
    own = read_table(results, "wait")["m"]["a"]
    assert own.seeds == [0, 1, 7]
    assert own.val == pytest.approx([math.log(2), 0.0, -math.log(2)])
    assert own.test == own.val
    assert own.parameters == [1.5, 1.5, 1.5]


def test_other_seeds_are_no_pairs() -> None:
    results = [result("wait", "m", errors=[0.4]), result("a", "m", errors=[0.2], seeds=[5])]
    with pytest.raises(UsageError, match="different seeds"):
        read_table(results, "wait")


ALIKE = {name: {"slots": 2.0} for name in "mno"}


def test_few_seeds_are_pulled_towards_the_mean_of_members_alike() -> None:
    table: Table = {"m": {"a": ratios(1.0, 1.0)}, "n": {"a": ratios(0.0, 0.0)}}
    # Members that nothing tells apart bring the same: the mean of all seeds.
    assert shrunk(table, "val", ALIKE)["m"]["a"] == pytest.approx(0.5)
    apart = {"m": {"slots": 2.0}, "n": {"slots": 3.0}}
    few = shrunk(table, "val", apart)["m"]["a"]
    many: Table = {"m": {"a": ratios(*[1.0] * 64)}, "n": {"a": ratios(*[0.0] * 64)}}
    assert 0.5 < few < shrunk(many, "val", apart)["m"]["a"] < 1.0


def test_what_an_arm_brings_may_depend_on_descriptors() -> None:
    places = {str(slots): {"slots": float(slots)} for slots in (1, 2, 3, 4)}
    table: Table = {name: {"a": ratios(*[0.1 * int(name)] * 8)} for name in places}
    table["4"]["a"] = ratios(0.1)
    found = shrunk(table, "val", places)
    # Its own seed is bad luck; what lies on the line beside it stays where it is.
    assert found["4"]["a"] > 0.15
    assert found["1"]["a"] < found["2"]["a"] < found["3"]["a"]


def test_the_best_single_is_among_those_that_went_furthest_everywhere() -> None:
    table: Table = {
        "m": {"a": ratios(0.9), "b": ratios(0.2, 0.2), "c": ratios(0.1, 0.1)},
        "n": {"a": ratios(0.9), "b": ratios(-0.3, -0.3), "c": ratios(0.1, 0.1)},
    }
    assert most_played(table, ["a", "b", "c"]) == ["b", "c"]
    assert best_single(table, ["a", "b", "c"], "val") == "c"


def test_waiting_is_best_where_nothing_helps() -> None:
    table: Table = {"m": {"a": ratios(-0.5, -0.5)}, "n": {"a": ratios(0.1, 0.1)}}
    assert best_by_member(table, ["a"], "val", ALIKE)["m"] == (None, 0.0)
    table = {"m": {"a": ratios(0.5, 0.5), "b": ratios(0.1, 0.1)}, "n": {"a": ratios(0.2)}}
    assert best_by_member(table, ["a", "b"], "val", ALIKE)["m"][0] == "a"


def test_a_member_s_best_went_furthest_there() -> None:
    table: Table = {"m": {"long": ratios(0.5, 0.5), "short": ratios(0.9)}}
    assert best_by_member(table, ["long", "short"], "val", ALIKE)["m"] == (
        "long",
        pytest.approx(0.5),
    )


def test_members_that_were_not_played_get_what_members_like_them_want() -> None:
    places = {f"{slots} slots": {"slots": float(slots)} for slots in range(1, 7)}
    played = [name for name in places if name != "2 slots"]
    # What pays in shallow hosts hurts in deep ones; the other plan brings the same everywhere.
    table: Table = {
        name: {"shallow": ratios(*[0.3 - 0.1 * place] * 9), "any": ratios(*[0.01] * 9)}
        for place, name in enumerate(played)
    }
    found = best_by_likeness(table, ["shallow", "any"], "val", places, price=0.0, most=2)
    assert found["2 slots"] == "shallow"
    assert found["6 slots"] == "any"
    for own in table.values():
        own["any"].parameters = [1.5] * 9
    priced = best_by_likeness(table, ["shallow", "any"], "val", places, price=0.05, most=2)
    assert priced["2 slots"] == "shallow"
    assert priced["6 slots"] is None, "it adds more than it brings"
    dear = best_by_likeness(table, ["shallow", "any"], "val", places, price=9.0, most=2)
    assert dear["2 slots"] == "shallow", "what adds nothing costs nothing"
    one = best_by_likeness(table, ["shallow", "any"], "val", places, price=0.0, most=1)
    assert (one["2 slots"], one["6 slots"]) == ("shallow", None), "what serves best with waiting"


def test_what_does_not_vary_among_the_played_ones_makes_no_other_one_a_stranger() -> None:
    classes = 3.321928094887362
    played = {f"m{n}": {"classes": classes, "depth": 2.0 + n % 2} for n in range(30)}
    # Rounding leaves of thirty equal numbers a deviation of 4e-16.
    assert 0 < np.std([place["classes"] for place in played.values()]) < 1e-12
    table: Table = {
        name: {"a": ratios(*[0.2 if place["depth"] == 2 else -0.1] * 4)}
        for name, place in played.items()
    }
    places = {**played, "deep": {"classes": classes - 1, "depth": 3.0}}
    found = best_by_likeness(table, ["a"], "val", places, price=0.0, most=1)
    assert found["deep"] is None
    rule = fit_nearest(table, played, {"a": []}, "val")
    assert rule.choose(places["deep"]) is None


def test_what_was_played_further_on_some_members_alone_is_not_taught() -> None:
    table: Table = {
        "m": {"lucky": ratios(0.9, 0.9), "fair": ratios(0.1)},
        "n": {"lucky": ratios(0.0), "fair": ratios(0.1)},
        "o": {"fair": ratios(0.1)},
    }
    found = best_by_likeness(table, ["lucky", "fair"], "val", ALIKE, price=0.0, most=2)
    assert set(found.values()) == {"fair"}


def test_a_few_arms_serve_the_members_together() -> None:
    places = {"m": {"slots": 1.0}, "n": {"slots": 9.0}}
    many = [0.0] * 64
    table: Table = {
        "m": {"lucky": ratios(9.0), "a": ratios(*[0.5] * 64), "b": ratios(*[0.4] * 64)},
        "n": {"lucky": ratios(9.0), "a": ratios(*[-0.5] * 64), "b": ratios(*[-0.4] * 64)},
    }
    for own, worth in zip(table.values(), (-0.1, 0.1), strict=True):
        own["c"] = ratios(*[worth] * 64)
        own["nothing"] = ratios(*many)
    table["m"]["here alone"] = ratios(*[9.0] * 64)
    arms = [*table["m"]]
    # One seed is not compared with 64 as long as there are enough others.
    assert choose_few(table, arms, "val", places, 2) == ["a", "c"]
    assert choose_few(table, arms, "val", places, 1) == ["a"]
    assert choose_few(table, arms, "val", places, 9) == ["lucky", "a", "b", "c", "nothing"]


def test_hindsight_is_worth_what_members_differ_by() -> None:
    table: Table = {
        "m": {"a": ratios(0.1, 0.1, 0.1, 0.1), "b": ratios(*[-0.1] * 4)},
        "n": {"a": ratios(-0.1, -0.1, -0.1, -0.1), "b": ratios(*[0.3] * 4)},
    }
    found = measure_headroom(table, ["a", "b"], "val")
    # The best single arm is b, 0.1 on average; hindsight has 0.1 and 0.3.
    assert found["single"] == pytest.approx(0.1)
    assert found["hindsight"] == pytest.approx(0.1)
    assert (found["members"], found["seeds"]) == (2.0, 4.0)


def test_luck_is_worth_nothing_in_hindsight() -> None:
    draw = np.random.default_rng(0)
    table: Table = {
        f"m{number}": {arm: ratios(*draw.normal(0, 0.1, 2).tolist()) for arm in "abcdefgh"}
        for number in range(400)
    }
    found = measure_headroom(table, list("abcdefgh"), "val")
    assert abs(found["hindsight"]) < 4 * found["standard_error"]
    assert found["standard_error"] < 0.01


def test_hindsight_needs_two_seeds_and_may_wait() -> None:
    assert measure_headroom({"m": {"a": ratios(0.1)}}, ["a"], "val") == {}
    worse: Table = {"m": {"a": ratios(-0.1, -0.2)}, "n": {"a": ratios(-0.3, -0.1)}}
    found = measure_headroom(worse, ["a"], "val")
    assert (found["hindsight"], found["single"]) == (0.0, 0.0)


def test_a_member_may_differ_from_those_that_look_like_it() -> None:
    table: Table = {
        "m": {"a": ratios(0.4, 0.4, 0.4, 0.4)},
        "n": {"a": ratios(-0.4, -0.4, -0.4, -0.4)},
        "o": {"a": ratios(-0.4)},
    }
    pooled = {name: own["a"] for name, own in shrunk(table, "val", ALIKE).items()}
    assert pooled["m"] == pytest.approx(pooled["n"])
    found = {name: own["a"] for name, own in shrunk(table, "val", ALIKE, hidden=0.8).items()}
    assert found["m"] > 0.25
    assert found["n"] < found["o"] < 0, "four seeds tell more than one"
    assert shrunk(table, "val", ALIKE, hidden=1.0)["m"]["a"] > found["m"]
    assert best_by_member(table, ["a"], "val", ALIKE, hidden=0.8)["m"][0] == "a"
    places = {**ALIKE, "new": {"slots": 2.0}}
    taught = best_by_likeness(table, ["a"], "val", places, price=0.0, most=1, hidden=0.8)
    assert taught == {"m": "a", "n": None, "o": None, "new": None}
