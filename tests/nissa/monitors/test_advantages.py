from __future__ import annotations

from typing import Any

import pytest

from esper.nissa.monitors.advantages import check_shape
from tests.nissa.monitors.series_of import healthy_update, levels


@pytest.mark.parametrize(
    ("numbers", "subjects"),
    [
        ((0.5, 1.0, 0.5), []),
        ((3.0, 10.0, 0.15), []),
        ((-3.1, 0.0, 0.5), ["skew"]),
        # Episode 100 of the briefing of 10 January.
        ((3.97, 15.69, 0.113), ["skew", "kurtosis", "positive"]),
        ((0.0, 0.0, 0.86), ["positive"]),
        ((None, None, None), []),
    ],
)
def test_advantages_out_of_shape(numbers: tuple[Any, Any, Any], subjects: list[str]) -> None:
    assert [found.subject for found in check_shape(*numbers)] == subjects


def test_once_is_chance() -> None:
    sick = {"advantage_skew": 4.0, "advantage_kurtosis": 0.0, "advantage_positive": 0.1}
    updates = [healthy_update(number, **sick) for number in range(3)]
    assert levels("advantage_shape", *updates[:2]) == {}
    assert levels("advantage_shape", *updates) == {"skew": "info", "positive": "warning"}
    well = healthy_update(3, advantage_skew=0.1, advantage_positive=0.1)
    assert levels("advantage_shape", *updates, well) == {"positive": "warning"}
