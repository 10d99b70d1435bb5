from __future__ import annotations

from typing import Any

import pytest

from esper.nissa.monitors.rewards import check_attribution, check_ransomware, check_shares
from esper.nissa.schema import EpochRow, RunRow, StageRow
from tests.nissa.monitors.series_of import healthy_round, levels


@pytest.mark.parametrize(
    ("ratio", "penalty", "is_found"),
    [
        (5.0, -0.1, True),
        (4.9, -0.1, False),
        (9.0, 0.0, False),
        (9.0, None, True),
        (None, -1, False),
    ],
)
def test_seeds_that_claim_more_than_there_is(
    ratio: float | None, penalty: float | None, is_found: bool
) -> None:
    assert (check_attribution(ratio, penalty) is not None) is is_found


@pytest.mark.parametrize(
    ("contribution", "improvement", "severity"),
    [
        (0.5, -0.3, "warning"),
        (1.0, -0.3, "critical"),
        (0.1, -0.3, None),
        (0.5, -0.2, None),
        (5.0, 3.0, None),
        (None, -1.0, None),
        (1.0, None, None),
    ],
)
def test_ransomware(
    contribution: float | None, improvement: float | None, severity: str | None
) -> None:
    found = check_ransomware("r0c0", contribution, improvement)
    assert (found.severity if found else None) == severity
    stage = StageRow(step=3, slot="r0c0", contribution=contribution, improvement=improvement)
    expected = {"r0c0": severity} if severity else {}
    assert levels("ransomware", stage, EpochRow(step=3), run=RunRow()) == expected


@pytest.mark.parametrize(
    ("pbrs", "gaming", "subjects"),
    [
        (0.2, 0.01, []),
        (0.05, 0.01, ["pbrs_share"]),
        (0.5, 0.05, ["pbrs_share", "anti_gaming_share"]),
        (None, None, []),
    ],
)
def test_shares_of_the_reward(
    pbrs: float | None, gaming: float | None, subjects: list[str]
) -> None:
    assert [found.subject for found in check_shares(pbrs, gaming)] == subjects


@pytest.mark.parametrize(
    ("changes", "subjects"),
    [
        ({}, set()),
        ({"attribution_ratio_max": 6.0}, {"attribution"}),
        ({"ransomware_count": 2}, {"ransomware"}),
    ],
)
def test_rounds_are_watched(changes: dict[str, Any], subjects: set[str]) -> None:
    assert set(levels("reward_hacking", healthy_round(0, **changes))) == subjects
    assert levels("reward_shares", healthy_round(0)) == {}
