from __future__ import annotations

import pytest

from esper.leyline.errors import UsageError
from esper.proof.halving import Rung, parse_rungs, shared_ranking, survivors

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


def test_half_of_the_places_are_shared_and_half_the_members_own() -> None:
    assert survivors(SCORES, 2, is_shared=False) == {"narrow": ["b", "a"], "noisy": ["b", "c"]}
    assert survivors(SCORES, 3, is_shared=False) == {
        "narrow": ["b", "c", "a"],
        "noisy": ["b", "c", "d"],
    }


def test_settings_are_the_same_everywhere() -> None:
    assert survivors(SCORES, 2, is_shared=True) == {"narrow": ["b", "c"], "noisy": ["b", "c"]}
