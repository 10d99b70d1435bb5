from __future__ import annotations

from typing import Any

import pytest

from esper.nissa.schema_runs import RunRow
from tests.nissa.monitors.series_of import ROUNDS, as_levels, findings, healthy_update, levels


@pytest.mark.parametrize(
    ("rounds", "limit"),
    [(15, -0.5), (20, -0.5), (21, -0.2), (50, -0.2), (100, 0.0), (150, 0.0), (152, 0.1)],
)
def test_more_is_asked_of_the_critic_as_the_run_goes_on(rounds: int, limit: float) -> None:
    run = RunRow(kind="train", rounds=200)
    for value, expected in ((limit, []), (limit - 0.01, [("warning", limit)])):
        update = healthy_update(rounds - 1, explained_variance=value)
        found = findings("explained_variance", update, run=run)
        assert [(one.severity, one.threshold) for one in found] == expected


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    flagged = healthy_update(ROUNDS - 1, explained_variance=-5.0, low_variance=True)
    assert levels("explained_variance", flagged) == {"low_variance": "info"}
    unmeasured = healthy_update(ROUNDS - 1, explained_variance=None)
    assert levels("explained_variance", unmeasured) == {}
    tiny = {"return_std": 1e-4, "low_variance": False}
    denied = healthy_update(ROUNDS - 1, explained_variance=-5.0, **tiny)
    assert levels("explained_variance", denied) == {None: "warning"}


def test_nothing_is_asked_of_a_critic_that_nobody_has_taught_yet() -> None:
    for number, found in ((0, {}), (1, {None: "warning"})):
        update = healthy_update(number, explained_variance=-0.9)
        assert levels("explained_variance", update) == found


def test_the_monitor_knows_how_far_the_run_is() -> None:
    early = healthy_update(1, explained_variance=-0.4)
    late = healthy_update(ROUNDS - 1, explained_variance=0.05)
    assert levels("explained_variance", early) == {}
    assert levels("explained_variance", late) == {None: "warning"}
    # Without a plan the strictest limit holds.
    assert levels("explained_variance", late, run=RunRow()) == {None: "warning"}
    # The second of five rounds is 40 % of the run, and the critic has had one lesson.
    brief = RunRow(kind="train", rounds=5, rows=4)
    assert levels("explained_variance", early, run=brief) == {}


TEACHING = {
    "critic_op_sensitivity": {"q_variance": 1e-6, "q_op_spread": 0.003},
    "advantage_bias": {
        "advantage_by_op": {"WAIT": {"mean": -0.3, "std": 0.1, "n": 500, "is_biased": True}}
    },
    "value_collapse": {"value_std": 0.001},
    "value_loss_by_op": {
        "value_loss_by_op": {"WAIT": 0.01, "PRUNE": 1.0},
        "advantage_by_op": {op: {"mean": 0.0, "std": 1.0, "n": 200} for op in ("WAIT", "PRUNE")},
    },
    "value_after_germination": {
        "value_by_state": {
            "germinated": {"n": 50, "error": 3.0, "std": 1.0},
            "other": {"n": 500, "error": 0.0, "std": 1.0},
        }
    },
}
"""What a critic looks like that has hardly learned anything."""


@pytest.mark.parametrize("name", TEACHING)
def test_a_critic_is_judged_once_it_has_had_time_to_learn(name: str) -> None:
    for number, is_judged in ((0, False), (1, False), (9, False), (10, True)):
        assert bool(levels(name, healthy_update(number, **TEACHING[name]))) is is_judged


def test_nothing_is_said_of_an_op_that_the_critic_does_not_see() -> None:
    update = healthy_update(ROUNDS - 1, q_variance=None, q_op_spread=None, q_by_op=None)
    assert levels("critic_op_sensitivity", update) == {}


@pytest.mark.parametrize(
    ("variance", "spread", "subjects"),
    [
        (0.01, 0.1, []),
        (0.009, 0.5, ["q_variance"]),
        (0.5, 0.09, ["q_op_spread"]),
        (0.0, 0.0, ["q_variance", "q_op_spread"]),
        (None, None, []),
    ],
)
def test_a_critic_must_tell_the_ops_apart(
    variance: float | None, spread: float | None, subjects: list[str]
) -> None:
    update = healthy_update(10, q_variance=variance, q_op_spread=spread)
    assert list(levels("critic_op_sensitivity", update)) == subjects


@pytest.mark.parametrize(
    ("numbers", "biased"),
    [
        ({"mean": -1.1, "std": 1.0, "n": 101, "is_biased": True}, True),
        ({"mean": 1.1, "std": 1.0, "n": 100, "is_biased": False}, False),
        ({}, False),
    ],
)
def test_advantages_of_an_op_must_not_be_one_sided(numbers: dict[str, Any], biased: bool) -> None:
    update = healthy_update(10, advantage_by_op={"PRUNE": numbers})
    assert levels("advantage_bias", update) == ({"PRUNE": "warning"} if biased else {})


@pytest.mark.parametrize(
    ("spread", "returns", "low_variance", "severity"),
    [
        (0.0018, 1.5, False, "warning"),
        (0.1, 1.5, False, None),
        (0.0, 1e-5, True, None),
        (None, 1.5, False, None),
    ],
)
def test_a_critic_that_says_the_same_of_everything_is_found(
    spread: float | None, returns: float, low_variance: bool, severity: str | None
) -> None:
    update = healthy_update(10, value_std=spread, return_std=returns, low_variance=low_variance)
    assert levels("value_collapse", update) == as_levels(severity)


def test_floored_advantages_are_mentioned() -> None:
    assert levels("advantage_floored", healthy_update(0, advantage_floored=True)) == {None: "info"}
    assert levels("advantage_floored", healthy_update(0, advantage_floored=None)) == {}


@pytest.mark.parametrize(
    ("losses", "counts", "found"),
    [
        ({"WAIT": 0.1, "PRUNE": 1.1}, {"WAIT": 900, "PRUNE": 100}, ["PRUNE"]),
        ({"WAIT": 0.1, "PRUNE": 1.0}, {"WAIT": 900, "PRUNE": 100}, []),
        ({"WAIT": 0.1, "PRUNE": 9.0}, {"WAIT": 900, "PRUNE": 99}, []),
        ({"WAIT": 0.1, "PRUNE": None}, {"WAIT": 900, "PRUNE": 900}, []),
        ({"WAIT": 9.0}, {"WAIT": 900}, []),
    ],
)
def test_an_op_whose_values_are_missed(
    losses: dict[str, float | None], counts: dict[str, int], found: list[str]
) -> None:
    by_op = {op: {"mean": 0.0, "std": 1.0, "n": count} for op, count in counts.items()}
    update = healthy_update(10, value_loss_by_op=losses, advantage_by_op=by_op)
    assert list(levels("value_loss_by_op", update)) == found


@pytest.mark.parametrize(
    ("numbers", "subjects"),
    [
        ((0.5, 1.0, 0.5), []),
        ((3.0, 10.0, 0.15), []),
        ((-3.1, 0.0, 0.5), ["skew"]),
        # Episode 100 of the briefing of 10 January.
        ((3.97, 15.69, 0.113), ["skew", "kurtosis", "positive"]),
        ((0.0, 0.0, 0.86), ["positive"]),
        ((None, None, None), []),
    ],
)
def test_advantages_out_of_shape(numbers: tuple[Any, Any, Any], subjects: list[str]) -> None:
    names = ("advantage_skew", "advantage_kurtosis", "advantage_positive")
    shape = dict(zip(names, numbers, strict=True))
    updates = [healthy_update(number, **shape) for number in range(3)]
    assert list(levels("advantage_shape", *updates)) == subjects


def test_once_is_chance() -> None:
    sick = {"advantage_skew": 4.0, "advantage_kurtosis": 0.0, "advantage_positive": 0.1}
    updates = [healthy_update(number, **sick) for number in range(3)]
    assert levels("advantage_shape", *updates[:2]) == {}
    assert levels("advantage_shape", *updates) == {"skew": "info", "positive": "warning"}
    well = healthy_update(3, advantage_skew=0.1, advantage_positive=0.1)
    assert levels("advantage_shape", *updates, well) == {"positive": "warning"}


@pytest.mark.parametrize(
    ("planted", "other", "is_found"),
    [
        ({"n": 30, "error": 2.1, "std": 1.0}, {"n": 300, "error": 0.1, "std": 1.9}, True),
        ({"n": 30, "error": -2.1, "std": 1.0}, {"n": 300, "error": 0.1, "std": 1.9}, True),
        ({"n": 30, "error": 2.0, "std": 1.0}, {"n": 300, "error": 0.1, "std": 1.9}, False),
        ({"n": 29, "error": 9.0, "std": 1.0}, {"n": 300, "error": 0.1, "std": 1.9}, False),
        ({"n": 30, "error": 9.0, "std": 1.0}, {"n": 300, "error": 0.1, "std": 0.0}, False),
        ({}, {"n": 300, "error": 0.1, "std": 1.9}, False),
    ],
)
def test_a_critic_that_misjudges_new_seeds(
    planted: dict[str, float], other: dict[str, float], is_found: bool
) -> None:
    by_state = {"germinated": planted, "other": other}
    told = levels("value_after_germination", healthy_update(10, value_by_state=by_state))
    assert bool(list(told)) == is_found
    # In the first round a critic has learned nothing yet.
    first = levels("value_after_germination", healthy_update(9, value_by_state=by_state))
    assert not list(first)
