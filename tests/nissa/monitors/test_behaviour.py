from __future__ import annotations

import pytest

from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import EpisodeRow, RunRow
from tests.nissa.monitors.series_of import (
    as_levels,
    findings,
    healthy_round,
    healthy_update,
    levels,
)


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
    rows = healthy_round(0, wait_share_free=share, free_steps=free)
    assert levels("never_acts", rows) == ({None: "warning"} if is_found else {})


@pytest.mark.parametrize(
    ("share", "severity"), [(None, None), (0.05, None), (0.06, "warning"), (0.11, "critical")]
)
def test_observations_at_their_clamp(share: float | None, severity: str | None) -> None:
    row = healthy_round(0, obs_clamp_share=share)
    assert levels("observation_clamp", row) == as_levels(severity)


@pytest.mark.parametrize(
    ("ratio", "severity"), [(None, None), (2.0, None), (2.1, "info"), (5.1, "warning")]
)
def test_growth_out_of_proportion(ratio: float | None, severity: str | None) -> None:
    expected = as_levels(severity)
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
    assert set(levels("stillborn_blueprint", healthy_round(0, blueprint_fates=fates))) == {
        "conv_small",
        "attention",
    }
    assert levels("stillborn_blueprint", healthy_round(0, blueprint_fates=None)) == {}


def test_rollbacks_are_told() -> None:
    lost = EpisodeRow(row=3, rolled_back=True, rollback_reason="nan")
    assert levels("governor_rollback", lost) == {"nan": "warning"}
    assert levels("governor_rollback", EpisodeRow(row=3, rolled_back=None)) == {}


def test_the_features_at_their_clamp_are_named() -> None:
    features = {"loss_norm": 0.9, "grad_norm": 0.2, "alpha": 0.4, "age": 0.3}
    row = healthy_round(0, obs_clamp_share=0.2, obs_clamp_features=features)
    assert findings("observation_clamp", row)[0].message.endswith(
        ": loss_norm 90%, alpha 40%, age 30%"
    )


@pytest.mark.parametrize(
    ("dependence", "severity"),
    [
        ([0.9, 0.9], None),
        ([0.4, 0.35, 0.31], "warning"),
        ([0.4, 0.29, 0.9], None),
        ([0.7, None, 0.8, 0.61], "critical"),
        ([None] * 5, None),
    ],
)
def test_a_policy_that_copies_itself(dependence: list[float | None], severity: str | None) -> None:
    rows = [healthy_update(n, feedback_dependence=one) for n, one in enumerate(dependence)]
    assert levels("shortcut_learning", *rows) == as_levels(severity)


@pytest.mark.parametrize(
    ("germinated", "fossilized", "is_found"),
    [
        # The briefing of 10 January: 997 seeds, 40 fossilized.
        ([77] * 13, [3] * 13, True),
        ([10] * 10, [1] * 10, False),
        ([9] * 10, [0] * 10, False),
        ([100] + [1] * 10, [0] * 11, False),
        ([None] * 10, [None] * 10, False),
    ],
)
def test_seeds_that_are_thrown_away(
    germinated: list[int | None], fossilized: list[int | None], is_found: bool
) -> None:
    rows = [
        healthy_round(n, seeds_germinated=begun, seeds_fossilized=kept)
        for n, (begun, kept) in enumerate(zip(germinated, fossilized, strict=True))
    ]
    assert levels("wasted_seeds", *rows) == ({None: "warning"} if is_found else {})


def test_a_rollback_of_one_network_is_told_with_its_reason() -> None:
    quiet, bad = EpochRow(step=2), EpochRow(step=3, rollback_reason="not_finite")
    assert levels("rollback", quiet, run=RunRow()) == {}
    (found,) = findings("rollback", quiet, bad, run=RunRow())
    assert (found.subject, found.severity) == ("not_finite", "warning")
    assert found.message == "the network was rolled back: its loss was not finite"
