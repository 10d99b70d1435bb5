from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from esper.nissa.monitors.policy import was_used
from esper.nissa.schema_runs import UpdateHeadRow
from tests.nissa.monitors.series_of import as_levels, healthy_head, healthy_update, levels


@pytest.mark.parametrize(
    ("most", "least", "subjects"),
    [
        (5.0, 0.1, []),
        (5.1, 0.5, ["explosion"]),
        (2.0, 0.09, ["collapse"]),
        (9.0, 0.01, ["explosion", "collapse"]),
        (None, None, []),
    ],
)
def test_the_joint_ratio(most: float | None, least: float | None, subjects: list[str]) -> None:
    updates = [healthy_update(number, ratio_max=most, ratio_min=least) for number in range(3)]
    assert list(levels("joint_ratio", *updates)) == subjects


def test_one_decision_of_one_update_is_no_explosion() -> None:
    """The documents' smoke run: 40 decisions an update, the heads between 0.39 and 1.9."""
    ranges = [(0.037, 1.7), (0.049, 1.1), (0.80, 1.2), (0.51, 5.7), (0.31, 4.2)]
    updates = [
        healthy_update(number, ratio_min=least, ratio_max=most)
        for number, (least, most) in enumerate(ranges)
    ]
    for end in range(1, 6):
        assert levels("joint_ratio", *updates[:end]) == {}
    lasting = [healthy_update(number, ratio_min=0.04, ratio_max=6.0) for number in range(3)]
    assert levels("joint_ratio", *lasting[:2]) == {}
    assert levels("joint_ratio", *lasting) == {"explosion": "critical", "collapse": "warning"}


@pytest.mark.parametrize(
    ("ratio", "severity"),
    [(None, None), (3.0, None), (3.01, "warning"), (10.0, "warning"), (10.1, "critical")],
)
def test_the_ratio_of_a_head(ratio: float | None, severity: str | None) -> None:
    head = healthy_head("tempo", 0, ratio_max=ratio)
    assert levels("head_ratio", head, healthy_update(0)) == as_levels(severity, "tempo")


def test_one_head_may_explode_while_the_joint_ratio_looks_fine() -> None:
    heads = [healthy_head("op", 0), healthy_head("blueprint", 0, ratio_max=10.5)]
    update = healthy_update(0, ratio_max=4.8)
    assert levels("joint_ratio", *heads, update) == {}
    assert levels("head_ratio", *heads, update) == {"blueprint": "critical"}


def test_an_update_that_changes_nothing_is_said() -> None:
    still = {"ratio_min": 0.995, "ratio_max": 1.005}
    masked = {"usage": 0.0, "free_steps": 0, "ratio_min": 1.0, "ratio_max": 1.0}
    update = healthy_update(0)
    assert levels("head_ratio", healthy_head("op", 0, **still), update) == {"all heads": "info"}
    moving = healthy_head("slot", 0)
    assert levels("head_ratio", healthy_head("op", 0, **still), moving, update) == {}
    # Heads that were never used say nothing either way.
    assert levels("head_ratio", healthy_head("op", 0, **masked), update) == {}
    assert levels("head_ratio", healthy_head("op", 0, **masked), moving, update) == {}
    assert levels("head_ratio", update) == {}
    unmeasured = healthy_head("op", 0, ratio_min=None, ratio_max=None)
    assert levels("head_ratio", unmeasured, update) == {}


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, True),
        ({"usage": 0.0}, False),
        ({"free_steps": 0}, False),
        ({"valid_actions": 1.0}, False),
        ({"usage": None, "free_steps": None, "valid_actions": None}, True),
    ],
)
def test_a_head_without_a_choice_was_not_used(changes: dict[str, Any], used: bool) -> None:
    assert was_used(healthy_head("slot", 0, **changes)) is used
    assert was_used(UpdateHeadRow(head="slot"))


@pytest.mark.parametrize(
    ("kl", "severity"), [(None, None), (0.1, None), (0.11, "warning"), (0.51, "critical")]
)
def test_the_kl_of_an_update(kl: float | None, severity: str | None) -> None:
    assert levels("kl_spike", healthy_update(0, approx_kl=kl)) == as_levels(severity)


@pytest.mark.parametrize(
    ("newest", "is_found"),
    [
        ({}, True),
        ({"approx_kl": 0.004}, False),
        ({"approx_kl": None}, False),
        ({"clipfrac": 0.1}, False),
        # Nothing to learn from: every step was forced.
        ({"usable_steps": 0}, False),
    ],
)
def test_a_policy_that_stands_still_is_found(newest: dict[str, Any], is_found: bool) -> None:
    # The values of the briefing of 10 January, which were read as good at first.
    still = [2.6e-9, 4.8e-9, 5.0e-9, -7.1e-11, 8.9e-10]
    rows = [healthy_update(n, approx_kl=kl, clipfrac=0.0) for n, kl in enumerate(still)]
    rows[-1] = replace(rows[-1], **newest)
    assert bool(levels("policy_stagnation", *rows)) is is_found
    assert levels("policy_stagnation", *rows[1:]) == {}


def test_the_monitor_of_stagnation_sees_the_last_updates() -> None:
    moving = [healthy_update(number) for number in range(5)]
    still = [healthy_update(number, approx_kl=1e-9, clipfrac=0.0) for number in range(5, 10)]
    assert levels("policy_stagnation", *moving) == {}
    assert levels("policy_stagnation", *moving, *still[:4]) == {}
    assert levels("policy_stagnation", *moving, *still) == {None: "warning"}
