from __future__ import annotations

from collections.abc import Iterator

import pytest

from esper.leyline.errors import UsageError
from esper.nissa.columns import TABLE_OF
from esper.nissa.monitors import MONITORS, Finding, register_monitor
from esper.nissa.monitors.recent import Recent
from esper.nissa.monitors.table import findings
from esper.nissa.schema import EpochRow


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
        "too_good",
        reads=EpochRow,
        thresholds="score > 100",
        meaning="Nobody is that good.",
        advice="Look for the test set in the training set.",
    )
    def too_good(recent: Recent) -> Iterator[Finding]:
        yield Finding(severity="info", message="too good")

    try:
        assert MONITORS.get("too_good").check is too_good
        with pytest.raises(UsageError, match="already registered"):
            register_monitor("too_good", reads=EpochRow, thresholds="", meaning="", advice="")(
                too_good
            )
    finally:
        MONITORS.unregister("too_good")


def test_checks_that_find_nothing_are_left_out() -> None:
    one, other = Finding(severity="info", message="a"), Finding(severity="warning", message="b")
    assert list(findings(None, one, None, other)) == [one, other]
    assert list(findings(None)) == []
