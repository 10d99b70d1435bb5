from __future__ import annotations

import math
from typing import Any

import pytest

from esper.nissa.schema_runs import UpdateHeadRow, UpdateRow
from tests.nissa.monitors.series_of import as_levels, healthy_head, healthy_update, levels


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([2.0] * 20, None),
        ([2.0] * 20 + [2.9], None),
        ([2.0] * 20 + [3.1], "info"),
        ([2.0] * 20 + [0.9], "info"),
        ([2.0] * 9 + [50.0], None),
        ([None] * 30, None),
        ([0.0] * 30, None),
    ],
)
def test_gradients_that_change_their_scale(norms: list[float | None], expected: str | None) -> None:
    updates = [healthy_update(number, grad_norm=norm) for number, norm in enumerate(norms)]
    assert levels("gradient_drift", *updates) == as_levels(expected)


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
    assert levels("gradient_norm", healthy_update(0, grad_norm=norm)) == as_levels(expected)


@pytest.mark.parametrize(
    ("log_prob", "expected"),
    [(None, None), (-50.0, None), (-50.1, "warning"), (-100.1, "critical")],
)
def test_actions_that_should_not_have_happened(
    log_prob: float | None, expected: str | None
) -> None:
    assert levels("log_prob", healthy_update(0, log_prob_min=log_prob)) == as_levels(expected)


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([True, False], None),
        ([False, True], "warning"),
        ([True, True], "warning"),
        ([False, True, True, True], "critical"),
        ([True, True, True, None], None),
    ],
)
def test_skipped_updates(skipped: list[bool | None], expected: str | None) -> None:
    updates = [healthy_update(n, was_skipped=one) for n, one in enumerate(skipped)]
    assert levels("skipped_updates", *updates) == as_levels(expected)


def test_numbers_that_are_not_finite() -> None:
    assert levels("numerical_instability", healthy_update(0, nonfinite=2)) == {None: "critical"}
    assert levels("numerical_instability", healthy_update(0, nonfinite=None)) == {}


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
    heads = [healthy_head("blueprint", number, grad_norm=one) for number, one in enumerate(norms)]
    found = levels("head_gradient", *heads, healthy_update(0))
    assert found == as_levels(expected, "blueprint")


def test_a_head_that_had_no_choice_needs_no_gradient() -> None:
    def told(**changes: Any) -> list[UpdateHeadRow | UpdateRow]:
        heads = [healthy_head("blueprint", n, grad_norm=0.0, **changes) for n in range(3)]
        return [row for n in range(3) for row in (heads[n], healthy_update(n))]

    assert levels("head_gradient", *told()) == {"blueprint": "warning"}
    assert levels("head_gradient", *told(usage=0.0, free_steps=0)) == {}
