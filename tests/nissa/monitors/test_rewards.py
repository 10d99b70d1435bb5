from __future__ import annotations

import math
from typing import Any

import pytest

from esper.nissa.schema import EpochRow, StageRow
from esper.nissa.schema_runs import EpisodeRow, RunRow
from tests.nissa.monitors.series_of import as_levels, healthy_round, levels


@pytest.mark.parametrize(
    ("ratio", "is_found"), [(5.0, True), (4.9, False), (9.0, True), (None, False)]
)
def test_seeds_that_claim_more_than_there_is(ratio: float | None, is_found: bool) -> None:
    row = healthy_round(0, attribution_ratio_max=ratio)
    assert list(levels("reward_hacking", row)) == (["attribution"] if is_found else [])


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
    stage = StageRow(step=3, slot="r0c0", contribution=contribution, improvement=improvement)
    found = levels("ransomware", stage, EpochRow(step=3), run=RunRow())
    assert found == as_levels(severity, "r0c0")


def episodes(number: int, returns: list[float], gains: list[float]) -> list[EpisodeRow]:
    """Return the episodes of a round; every two of them share a seed."""
    return [
        EpisodeRow(
            round=number, row=row, task="t", env_seed=row // 2, episodic_return=paid, gain=gain
        )
        for row, (paid, gain) in enumerate(zip(returns, gains, strict=True))
    ]


SMOKE = [
    [0.0, -0.207, -0.103, -0.106],
    [-0.141, 0.0, 0.0, 0.0],
    [-0.218, 0.0, 0.0, 0.0],
    [0.757, -0.600, 0.221, -0.452],
    [0.470, 1.003, 0.961, 1.443],
]
"""Returns of the documents' smoke run while the reward compared rows with a handful of twins; every
row was its twin, and every gain was 0."""


def test_a_return_for_networks_that_are_their_twins_is_found() -> None:
    rows: list[Any] = []
    found = []
    for number, returns in enumerate(SMOKE):
        rows += [*episodes(number, returns, [0.0] * 4), healthy_round(number)]
        found.append(levels("return_without_gain", *rows))
    assert found == [{}, {}, {}, {}, {None: "warning"}]


@pytest.mark.parametrize(
    ("paid", "gain", "noise", "is_found"),
    [
        (3.65, -1.11, 1.0, True),
        (3.65, 3.9, 1.0, False),
        (-0.1, -0.3, 0.01, False),
        # What may as well be luck is not told.
        (0.2, -0.1, 1.0, False),
    ],
)
def test_returns_and_gains_that_disagree(
    paid: float, gain: float, noise: float, is_found: bool
) -> None:
    rows: list[EpisodeRow] = []
    for number in range(4):
        luck = [noise, noise, -noise, -noise]
        rows += episodes(number, [paid + one for one in luck], [gain - one / 2 for one in luck])
    assert levels("return_without_gain", *rows) == as_levels("warning" if is_found else None)
    # Eight seeds are enough, two are not, however many rows share them.
    assert levels("return_without_gain", *rows[:4]) == {}
    unknown = [EpisodeRow(round=0, episodic_return=3.0, gain=gain) for gain in (None, math.nan)]
    assert levels("return_without_gain", *unknown * 4) == {}


@pytest.mark.parametrize(
    ("pbrs", "gaming", "subjects"),
    [
        (0.2, 0.01, []),
        (0.05, 0.01, ["pbrs"]),
        (0.5, 0.05, ["pbrs", "anti_gaming_share"]),
        # A reward without shaping has no share of it to watch.
        (0.0, 0.0, []),
        (None, None, []),
    ],
)
def test_shares_of_the_reward(
    pbrs: float | None, gaming: float | None, subjects: list[str]
) -> None:
    row = healthy_round(0, reward_terms={"pbrs": {"share": pbrs}}, anti_gaming_share=gaming)
    assert list(levels("reward_shares", row)) == subjects


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


def test_a_term_that_only_steers_must_not_be_most_of_the_reward() -> None:
    terms = {
        "gain": {"mean": 0.1, "share": 0.9},
        "rent": {"mean": -0.1, "share": 0.51},
        "pbrs": {"mean": 0.0, "share": 0.5},
        "shock": {"mean": None, "share": None},
        # Whoever wrote it knows what it pays for.
        "somebody's own": {"mean": 1.0, "share": 0.99},
    }
    assert levels("reward_terms", healthy_round(0, reward_terms=terms)) == {"rent": "info"}
    assert levels("reward_terms", healthy_round(0, reward_terms=None)) == {}


def test_credit_that_is_never_there_or_always_the_same() -> None:
    unpaid = {"hindsight_count": 0, "seeds_fossilized": 5}
    rows = [healthy_round(number, **unpaid) for number in range(10)]
    assert levels("hindsight_credit", *rows) == {"never paid": "info"}
    assert levels("hindsight_credit", *rows[:9]) == {}
    paid = healthy_round(10, hindsight_count=1, seeds_fossilized=5)
    assert levels("hindsight_credit", *rows, paid) == {}
    unmeasured = [healthy_round(number, seeds_fossilized=5) for number in range(10)]
    assert levels("hindsight_credit", *unmeasured) == {}
    capped = healthy_round(0, hindsight_count=10, hindsight_quantiles={"p50": 0.2})
    assert levels("hindsight_credit", capped) == {"at the cap": "info"}
    varied = healthy_round(0, hindsight_count=10, hindsight_quantiles={"p50": 0.1})
    assert levels("hindsight_credit", varied) == {}
