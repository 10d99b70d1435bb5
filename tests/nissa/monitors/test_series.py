from __future__ import annotations

import math

import pytest

from esper.nissa.monitors.series import is_latched, mean, measured, smoothed


def test_what_was_not_measured_is_left_out() -> None:
    assert measured([1.0, None, math.nan, math.inf, 2.0]) == [1.0, 2.0]
    assert mean([]) is None
    assert mean([1.0, 3.0]) == 2.0


def test_the_moving_average_starts_at_its_first_value() -> None:
    assert smoothed([], 0.9) is None
    assert smoothed([4.0], 0.9) == 4.0
    assert smoothed([4.0, 0.0], 0.75) == 3.0


@pytest.mark.parametrize(
    ("values", "latched"),
    [
        ([0.01, 0.01], False),
        ([0.01, 0.01, 0.01], True),
        ([0.01, 0.01, 0.2, 0.01, 0.01], False),
        ([0.01, 0.01, 0.01, 0.06], True),
        ([0.01, 0.01, 0.01, 0.08], False),
        ([0.01, 0.01, 0.01, 0.08, 0.01, 0.01], False),
        ([0.01, None, 0.01, None, None, 0.01], True),
        ([0.01, 0.01, 0.01, None], True),
        ([None] * 10, False),
        ([], False),
        ([0.05] * 10, False),
    ],
)
def test_three_in_a_row_latch_and_recovery_takes_more(
    values: list[float | None], latched: bool
) -> None:
    assert is_latched(values, enter=0.05, leave=0.075, consecutive=3) is latched
