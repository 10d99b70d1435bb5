from __future__ import annotations

import pytest

from esper.lab.proof.plans import Rung, parse_rungs, portfolio, shared_ranking
from esper.leyline.errors import UsageError

SCORES = {
    "narrow": {"a": 0.3, "b": 0.2, "c": 0.0, "d": 0.1},
    "noisy": {"a": -0.4, "b": 0.1, "c": 0.2, "d": 0.0},
}


def test_rungs_are_plans_times_seeds() -> None:
    assert parse_rungs(["64x2", "16x8"]) == (Rung(64, 2), Rung(16, 8))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["64"], "PLANSxSEEDS"),
        (["0x2"], "PLANSxSEEDS"),
        (["4x2", "8x2"], "more plans"),
        ([], "one rung"),
    ],
)
def test_rungs_that_make_no_sense(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_rungs(texts)


def test_the_shared_ranking_is_by_mean_over_members() -> None:
    # Means: a -0.05, b 0.15, c 0.1, d 0.05.
    assert shared_ranking(SCORES) == ["b", "c", "d", "a"]
    partly = {**SCORES, "other": {"a": 1.0, "d": 0.0}}
    assert shared_ranking(partly) == ["a", "d"]


def test_a_portfolio_adds_what_serves_where_those_before_are_weak() -> None:
    # With waiting beside them a and b serve with 0.3 in all, c with 0.2; b is best on average.
    assert portfolio(SCORES, 3) == ["b", "c", "a"]
    assert portfolio(SCORES, 9) == ["b", "c", "a", "d"]
    assert portfolio(SCORES, 2, first=["a"]) == ["a", "c"]
    harmful = {**SCORES, "small": {"a": -0.9, "b": -0.1, "c": -0.1, "d": -0.1}}
    better = {**harmful, "wide": {"a": 0.1, "b": 0.0, "c": 0.0, "d": 0.0}}
    assert portfolio(better, 1) == ["a"], "where a plan harms, waiting serves: it is worth 0"
    one = {"narrow": SCORES["narrow"]}
    assert portfolio(one, 3) == ["a", "b", "d"], "on one member it is the ranking there"
