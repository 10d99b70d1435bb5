from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from esper.leyline.errors import UsageError
from esper.nissa.columns import TABLE_OF
from esper.nissa.monitors import MONITORS, Finding, register_monitor
from esper.nissa.monitors.monitor import (
    BANDS,
    WINDOW,
    Limits,
    Recent,
    is_latched,
    light,
    measured,
    smoothed,
)
from esper.nissa.schema import DecisionRow, EpochRow, StageRow
from esper.nissa.schema_runs import RoundRow, RunRow, UpdateHeadRow, UpdateRow


@pytest.mark.parametrize("name", MONITORS.names())
def test_every_monitor_says_when_what_and_what_to_try(name: str) -> None:
    monitor = MONITORS.get(name)
    assert monitor.name == name
    assert monitor.reads in TABLE_OF
    assert monitor.thresholds
    assert monitor.meaning.endswith(".")
    assert monitor.advice.endswith((".", "?"))
    assert monitor.check.__doc__


def test_the_checks_of_the_design_are_there() -> None:
    assert {
        "joint_ratio",
        "head_ratio",
        "explained_variance",
        "kl_spike",
        "entropy",
        "head_collapse",
        "head_entropy_nats",
        "sparse_head_entropy",
        "critic_op_sensitivity",
        "advantage_bias",
        "lstm_rms",
        "lstm_drift",
        "gradient_drift",
        "gradient_norm",
        "performance_degradation",
        "trend",
        "gpu_memory",
        "never_acts",
        "reward_shares",
        "reward_hacking",
        "ransomware",
        "growth",
        "observation_clamp",
        "sudden_change",
        "log_prob",
        "numerical_instability",
    } <= set(MONITORS.names())


def test_a_third_party_adds_a_monitor_by_one_decorator() -> None:
    @register_monitor(
        reads=EpochRow,
        thresholds="score > 100",
        advice="Look for the test set in the training set.",
    )
    def too_good(recent: Recent) -> Iterator[Finding]:
        """Nobody is that good."""
        yield Finding("info", "too good")

    try:
        assert MONITORS.get("too_good").check is too_good
        assert MONITORS.get("too_good").meaning == "Nobody is that good."
        with pytest.raises(UsageError, match="already registered"):
            register_monitor(reads=EpochRow, thresholds="", advice="")(too_good)
    finally:
        MONITORS.unregister("too_good")


def test_only_the_end_of_an_update_counts() -> None:
    recent = Recent()
    for ordinal in range(3):
        recent.add(UpdateHeadRow(round=0, ordinal=ordinal, head="op", entropy=float(ordinal)))
        recent.add(UpdateRow(round=0, ordinal=ordinal, is_last=ordinal == 2))
    recent.add(UpdateHeadRow(round=1, head="op", entropy=9.0))
    assert [row.ordinal for row in recent.updates] == [2]
    assert [row.entropy for row in recent.heads["op"]] == [2.0, 9.0]


def test_slots_are_those_of_the_last_epoch() -> None:
    recent = Recent()
    recent.add(StageRow(step=1, slot="a"))
    recent.add(StageRow(step=1, slot="b"))
    assert set(recent.stages) == {"a", "b"}
    recent.add(StageRow(step=2, slot="b"))
    assert set(recent.stages) == {"b"}
    recent.add(StageRow(round=1, step=2, slot="c"))
    assert set(recent.stages) == {"c"}


def test_the_window_is_bounded() -> None:
    recent = Recent()
    for step in range(WINDOW + 10):
        recent.add(EpochRow(step=step))
        recent.add(DecisionRow(step=step))
    assert len(recent.epochs) == WINDOW
    assert recent.epochs[0].step == 10


def test_progress_is_the_share_of_rounds() -> None:
    assert Recent().progress is None
    recent = Recent(RunRow(rounds=10))
    assert recent.progress is None
    recent.add(RoundRow(round=0))
    assert recent.progress == 0.1
    recent.add(UpdateRow(round=4))
    assert recent.progress == 0.5


def test_what_was_not_measured_is_left_out() -> None:
    assert measured([1.0, None, math.nan, math.inf, 2.0]) == [1.0, 2.0]


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


@pytest.mark.parametrize(
    ("metric", "good", "watch", "bad"),
    [
        ("explained_variance", 0.3, 0.29, -0.01),
        ("clipfrac", 0.24, 0.25, 0.3),
        ("approx_kl", 0.014, 0.015, 0.03),
        ("grad_norm", 4.9, 5.0, 10.0),
        ("ratio_max", 1.4, 1.5, 2.0),
        ("growth_ratio", 1.9, 2.0, 5.0),
        ("obs_clamp_share", 0.04, 0.05, 0.1),
        ("stale_s", 1.0, 2.0, 5.0),
        ("anti_gaming_share", 0.04, 0.05, 0.1),
    ],
)
def test_colours(metric: str, good: float, watch: float, bad: float) -> None:
    assert [light(metric, value) for value in (good, watch, bad)] == ["good", "watch", "bad"]


def test_waiting_99_percent_is_good_and_always_is_bad() -> None:
    assert light("wait_share_free", 0.99) == "good"
    assert light("wait_share_free", 1.0) == "bad"


def test_what_is_not_known_has_no_colour() -> None:
    assert light("approx_kl", None) == "unknown"
    assert light("approx_kl", math.nan) == "unknown"
    assert light("somebody_elses", 1.0) == "unknown"
    assert all(band.meaning for band in BANDS.values())


@pytest.mark.parametrize(
    ("value", "severity", "told"),
    [
        (None, None, ""),
        (math.nan, None, ""),
        (1.0, None, ""),
        (1.5, "info", "1.50 of 1"),
        (3.0, "info", "3.00 of 1"),
        (9.0, "critical", "9.00 of 3"),
    ],
)
def test_the_worst_limit_that_is_passed_counts(
    value: float | None, severity: str | None, told: str
) -> None:
    message = "{value:.2f} of {limit:g}"
    found = Limits(info=1.0, critical=3.0).find(value, message, subject="x")
    assert (None if found is None else found.severity) == severity
    if value is not None and found is not None:
        assert (found.message, found.subject, found.value) == (told, "x", value)
        floor = Limits(info=-1.0, critical=-3.0, is_floor=True).find(-value, message)
        assert floor is not None
        assert floor.severity == severity
        assert floor.threshold == -(found.threshold or 0.0)
