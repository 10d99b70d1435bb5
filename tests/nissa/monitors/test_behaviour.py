from __future__ import annotations

from typing import Any

import pytest

from esper.nissa.monitors.behaviour import (
    check_growth,
    check_obs_clamp,
    check_wait_share,
    find_stillborn,
    wait_share,
)
from esper.nissa.schema import EpisodeRow, EpochRow, RunRow
from tests.nissa.monitors.series_of import healthy_round, levels


def test_only_free_decisions_count() -> None:
    ops = ["WAIT"] * 98 + ["GERMINATE", "WAIT"]
    forced = [True] * 90 + [False] * 10
    assert wait_share(ops, forced) == (0.9, 10)
    assert wait_share(["WAIT"] * 5, [True] * 5) == (None, 0)


@pytest.mark.parametrize(
    ("share", "free", "is_found"),
    [
        (1.0, 100, True),
        (1.0, 99, False),
        (0.999, 5_000, False),
        (0.99, 5_000, False),
        (0.884, 5_000, False),
        (None, 0, False),
        (1.0, None, True),
    ],
)
def test_waiting_is_right_and_never_acting_is_not(
    share: float | None, free: int | None, is_found: bool
) -> None:
    assert (check_wait_share(share, free) is not None) is is_found
    rows = healthy_round(0, wait_share_free=share, free_steps=free)
    assert levels("never_acts", rows) == ({None: "warning"} if is_found else {})


@pytest.mark.parametrize(
    ("share", "severity"), [(None, None), (0.05, None), (0.06, "warning"), (0.11, "critical")]
)
def test_observations_at_their_clamp(share: float | None, severity: str | None) -> None:
    found = check_obs_clamp(share)
    assert (found.severity if found else None) == severity
    assert levels("observation_clamp", healthy_round(0, obs_clamp_share=share)) == (
        {None: severity} if severity else {}
    )


@pytest.mark.parametrize(
    ("ratio", "severity"), [(None, None), (2.0, None), (2.1, "info"), (5.1, "warning")]
)
def test_growth_out_of_proportion(ratio: float | None, severity: str | None) -> None:
    found = check_growth(ratio)
    expected: dict[Any, Any] = {None: severity} if severity else {}
    assert (found.severity if found else None) == severity
    assert levels("growth_of_rows", healthy_round(0, growth_ratio=ratio)) == expected
    if ratio is not None:
        epoch = EpochRow(step=1, parameters=int(1_000 * ratio), host_parameters=1_000)
        assert levels("growth", epoch, run=RunRow()) == expected
        assert levels("growth", epoch, run=RunRow(rows=64)) == {}
    assert levels("growth", EpochRow(step=1, parameters=9), run=RunRow()) == {}


def test_blueprints_that_are_never_kept() -> None:
    # The table of the briefing of 10 January.
    fates = {
        "conv_heavy": {"germinated": 182, "fossilized": 16},
        "conv_small": {"germinated": 252, "fossilized": 0},
        "attention": {"germinated": 85, "fossilized": 0},
        "lora": {"germinated": 10, "fossilized": 0},
        "norm": {},
    }
    assert [found.subject for found in find_stillborn(fates)] == ["conv_small", "attention"]
    assert set(levels("stillborn_blueprint", healthy_round(0, blueprint_fates=fates))) == {
        "conv_small",
        "attention",
    }
    assert levels("stillborn_blueprint", healthy_round(0, blueprint_fates=None)) == {}


def test_rollbacks_are_told() -> None:
    lost = EpisodeRow(row=3, rolled_back=True, rollback_reason="nan")
    assert levels("governor_rollback", lost) == {"nan": "warning"}
    assert levels("governor_rollback", EpisodeRow(row=3, rolled_back=None)) == {}
