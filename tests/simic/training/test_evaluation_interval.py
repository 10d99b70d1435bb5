from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from esper.leyline.errors import UsageError
from esper.simic.training.evaluation import paired_interval


@pytest.mark.parametrize(
    ("confidence", "count", "expected"),
    # From printed tables of Student's t.
    [
        (0.95, 2, 12.706),
        (0.95, 5, 2.776),
        (0.95, 20, 2.093),
        (0.9, 10, 1.833),
        (0.99, 31, 2.75),
    ],
)
def test_the_reach_is_that_of_the_tables(confidence: float, count: int, expected: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = paired_interval(values, confidence)
    error = float(values.std(correction=1)) / math.sqrt(count)
    assert (found.high - found.mean) / error == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_an_interval_is_the_mean_and_its_reach(kind: Callable[[list[float]], Any]) -> None:
    found = paired_interval(kind([1.0, 2.0, 3.0, 4.0, 5.0]))
    reach = 2.7764 * math.sqrt(2.5 / 5)
    assert found.mean == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx((3.0 - reach, 3.0 + reach), abs=1e-3)
    assert str(found).startswith("+3.00 [")


def test_nine_of_ten_intervals_hold_the_truth() -> None:
    draws = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    hits = sum(i.low <= 0.5 <= i.high for i in (paired_interval(row, 0.9) for row in draws))
    assert 0.86 < hits / 400 < 0.94


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(UsageError, match="at least 2 pairs, got 1"):
        paired_interval(torch.ones(1))
    with pytest.raises(UsageError, match="confidence"):
        paired_interval(torch.ones(3), 1.0)
