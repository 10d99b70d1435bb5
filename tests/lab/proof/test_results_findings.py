from __future__ import annotations

import numpy as np
import pytest

from esper.lab.proof.arm import parse_arm
from esper.lab.proof.results import (
    best_static,
    by_member,
    fronts,
    privileged_share,
    restraint,
    summarise,
)
from tests.lab.proof.made_up import result

ERRORS = {
    "mine": np.array([[0.2, 0.2], [0.1, 0.4]]),
    "wait": np.array([[0.4, 0.4], [0.2, 0.4]]),
}
PLAYED = [
    result(arm, member, ERRORS[arm][place].tolist(), parameters=100 if arm == "wait" else 104)
    for place, member in enumerate(("m", "n"))
    for arm in ERRORS
]


def test_an_arm_in_figures() -> None:
    own = summarise(PLAYED, "mine", ERRORS)
    assert own["test_score"] == pytest.approx((80 + 75) / 2)
    assert own["error"] == pytest.approx((0.2 * 0.2 * 0.1 * 0.4) ** 0.25)
    assert own["parameters"] == pytest.approx(1.04)
    assert own["flops"] == pytest.approx(1.2)
    assert own["training_flops"] == 1.0
    assert own["ablation_flops"] == pytest.approx(1 / 30)
    assert own["total_flops"] == pytest.approx(1 + 1 / 30)


def test_figures_by_member() -> None:
    own = by_member(PLAYED, ERRORS, ["m", "n"])
    assert own["m"]["mine"]["log_ratio_over_wait"] == pytest.approx(np.log(2))
    assert own["n"]["mine"]["log_ratio_over_wait"] == pytest.approx(np.log(2) / 2)
    assert own["m"]["mine"]["points_over_wait"] == pytest.approx(20.0)
    assert own["m"]["wait"]["points_over_wait"] == 0.0
    assert own["m"]["mine"]["parameters_added"] == pytest.approx(0.04)


def test_restraint_is_judged_by_purpose() -> None:
    figures = {
        "m": {"mine": {"parameters_added": 0.04, "points_over_wait": -0.2}},
        "n": {"mine": {"parameters_added": 0.08, "points_over_wait": 3.0}},
        "o": {"mine": {"parameters_added": 0.00, "points_over_wait": -0.5}},
    }
    purposes = {"m": "neutral", "n": "lacks capacity", "o": "useless or harmful", "gone": "other"}
    found = restraint(figures, "mine", purposes)
    assert list(found) == ["neutral", "lacks capacity", "useless or harmful"]
    assert [each["is_restrained"] for each in found.values()] == [True, False, False]


def test_fronts_static_sizes_and_the_privileged_gain() -> None:
    summaries = {
        "a": {"error": 0.3, "parameters": 1.0, "flops": 1.0, "total_flops": 2.0},
        "static x2": {"error": 0.2, "parameters": 2, "flops": 2, "total_flops": 2},
    }
    assert fronts(summaries)["parameters"] == ["a", "static x2"]
    assert fronts(summaries)["total_flops"] == ["static x2"]
    sizes = {
        "static x1": {"error": 0.3, "training_flops": 1.0},
        "static x2": {"error": 0.2, "training_flops": 3.5},
    }
    assert best_static(sizes) == {
        "arm": "static x2",
        "error": 0.2,
        "training_flops_of_all_sizes": 4.5,
    }
    assert best_static({"a": {}}) is None
    errors = {**ERRORS, "privileged": ERRORS["wait"] / 4}
    specs = [parse_arm("privileged:file")]
    share = privileged_share(errors, "mine", specs)
    assert share == pytest.approx((3 * np.log(2)) / (4 * np.log(4)))
