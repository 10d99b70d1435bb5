from __future__ import annotations

import math
from typing import Any

import pytest

from esper.nissa.monitors.stability import (
    check_gradient_drift,
    check_gradient_norm,
    check_log_prob,
    check_lstm_drift,
    check_lstm_rms,
    check_skipped,
)
from tests.nissa.monitors.series_of import healthy_update, levels


def severity(found: Any) -> str | None:
    return found.severity if found else None


@pytest.mark.parametrize(
    ("rms", "expected"),
    [
        (None, None),
        (0.5, None),
        (10.0, None),
        (10.1, "warning"),
        (1e-7, "warning"),
        (math.nan, "critical"),
        (math.inf, "critical"),
    ],
)
def test_the_memory_of_the_policy(rms: float | None, expected: str | None) -> None:
    assert severity(check_lstm_rms("cell state", rms)) == expected
    found = levels("lstm_rms", healthy_update(0, lstm_c_rms=rms))
    assert found == ({"cell state": expected} if expected else {})


def test_a_memory_that_grows_late_in_an_episode() -> None:
    assert check_lstm_drift(1.0, 2.0) is None
    assert severity(check_lstm_drift(1.0, 2.1)) == "warning"
    assert check_lstm_drift(None, 2.0) is None
    assert check_lstm_drift(0.0, 2.0) is None
    drifting = healthy_update(0, lstm_c_rms_early=1.0, lstm_c_rms_late=3.0)
    assert levels("lstm_drift", drifting) == {None: "warning"}


def test_gradients_that_change_their_scale() -> None:
    steady = [2.0] * 20
    assert check_gradient_drift(steady) is None
    assert check_gradient_drift([*steady, 2.9]) is None
    assert severity(check_gradient_drift([*steady, 3.1])) == "info"
    assert severity(check_gradient_drift([*steady, 0.9])) == "info"
    assert check_gradient_drift([2.0] * 10) is None
    assert check_gradient_drift([2.0] * 9 + [50.0]) is None
    assert check_gradient_drift([None] * 30) is None
    assert check_gradient_drift([0.0] * 30) is None


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (None, None),
        (1e-7, None),
        (100.0, None),
        (1e-8, "warning"),
        (0.0, "warning"),
        (101.0, "critical"),
        (math.inf, "critical"),
        (math.nan, None),
    ],
)
def test_gradients_that_vanish_or_explode(norm: float | None, expected: str | None) -> None:
    assert severity(check_gradient_norm(norm)) == expected


@pytest.mark.parametrize(
    ("log_prob", "expected"),
    [(None, None), (-50.0, None), (-50.1, "warning"), (-100.1, "critical")],
)
def test_actions_that_should_not_have_happened(
    log_prob: float | None, expected: str | None
) -> None:
    assert severity(check_log_prob(log_prob)) == expected
    update = healthy_update(0, log_prob_min=log_prob)
    assert levels("log_prob", update) == ({None: expected} if expected else {})


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([], None),
        ([True, False], None),
        ([False, True], "warning"),
        ([True, True], "warning"),
        ([False, True, True, True], "critical"),
        ([True, True, True, None], None),
    ],
)
def test_skipped_updates(skipped: list[bool | None], expected: str | None) -> None:
    assert severity(check_skipped(skipped)) == expected
    if skipped:
        updates = [healthy_update(n, was_skipped=one) for n, one in enumerate(skipped)]
        assert levels("skipped_updates", *updates) == ({None: expected} if expected else {})


def test_numbers_that_are_not_finite() -> None:
    assert levels("numerical_instability", healthy_update(0, nonfinite=2)) == {None: "critical"}
    assert levels("numerical_instability", healthy_update(0, nonfinite=None)) == {}


def test_the_monitors_of_gradients_read_the_updates() -> None:
    updates = [healthy_update(number) for number in range(15)]
    assert levels("gradient_drift", *updates) == {}
    assert levels("gradient_drift", *updates, healthy_update(15, grad_norm=43.0)) == {None: "info"}
    assert levels("gradient_norm", *updates, healthy_update(15, grad_norm=143.0)) == {
        None: "critical"
    }
