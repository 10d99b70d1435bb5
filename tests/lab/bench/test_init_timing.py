from __future__ import annotations

import time

from esper.lab.bench import compare, take_turns


def test_the_ratio_is_that_of_neighbours() -> None:
    result = compare(
        "sleep",
        lambda: time.sleep(0.002),
        lambda: time.sleep(0.02),
        against="a longer one",
        rounds=3,
        calls=2,
    )
    assert 3 < result.ratio < 15
    assert result.least_ratio <= result.ratio <= result.greatest_ratio
    assert result.esper_ms < result.reference_ms


def test_calls_are_timed_together_and_the_first_turn_only_warms_up() -> None:
    ours, theirs = [], []
    pairs = take_turns(
        lambda: ours.append(1), lambda: theirs.append(1), rounds=3, calls=4, reference_calls=2
    )
    assert (len(pairs), len(ours), len(theirs)) == (3, 16, 8)
    assert all(own.wall > 0 and own.cpu > 0 for own, _ in pairs)
