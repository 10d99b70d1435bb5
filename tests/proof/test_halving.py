from __future__ import annotations

import pytest

from esper.leyline.errors import UsageError
from esper.proof.halving import Rung, parse_rungs, portfolio, shared_ranking

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


def test_a_portfolio_begins_with_the_best_on_average_and_adds_what_serves_where_it_is_weak() -> (
    None
):
    # Beside b, a adds 0.1 on the narrow member and c as much on the noisy one, d nothing at all.
    assert portfolio(SCORES, 1) == ["b"]
    assert portfolio(SCORES, 3) == ["b", "c", "a"]
    assert portfolio(SCORES, 9) == ["b", "c", "a", "d"]
    harmful = {**SCORES, "small": {"a": 0.0, "b": -0.1, "c": -0.2, "d": 0.05}}
    assert portfolio(harmful, 2) == ["b", "c"], "where all harm, waiting serves: it is worth 0"
    one = {"narrow": SCORES["narrow"]}
    assert portfolio(one, 3) == ["a", "b", "d"], "on one member it is the ranking there"
