from __future__ import annotations

import math
from typing import Any

import pytest

from esper.nissa.monitors.stability import (
    check_gradient_drift,
    check_gradient_norm,
    check_head_gradient,
    check_log_prob,
    check_skipped,
)
from esper.nissa.schema_runs import UpdateHeadRow, UpdateRow
from tests.nissa.monitors.series_of import healthy_head, healthy_update, levels


def severity(found: Any) -> str | None:
    return found.severity if found else None


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


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([], None),
        ([1e-8, 1e-8], None),
        ([1e-8, 1e-8, 1e-8], "warning"),
        ([1e-8, None, 1e-8, None, 1e-8], "warning"),
        ([1e-8, 1e-8, 0.2], None),
        ([0.2, 101.0], "critical"),
        ([None, None], None),
    ],
)
def test_a_head_without_a_gradient(norms: list[float | None], expected: str | None) -> None:
    assert severity(check_head_gradient("blueprint", norms)) == expected


def test_a_head_that_had_no_choice_needs_no_gradient() -> None:
    def told(**changes: Any) -> list[UpdateHeadRow | UpdateRow]:
        heads = [healthy_head("blueprint", n, grad_norm=0.0, **changes) for n in range(3)]
        return [row for n in range(3) for row in (heads[n], healthy_update(n))]

    assert levels("head_gradient", *told()) == {"blueprint": "warning"}
    assert levels("head_gradient", *told(usage=0.0, free_steps=0)) == {}
