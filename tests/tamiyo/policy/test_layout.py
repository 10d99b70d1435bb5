from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from esper.lab.imagined import middle_aged_hosts
from esper.leyline.actions import LifecycleOp
from esper.leyline.config import is_debugging
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.layout import (
    _CURVES,
    BASE_FEATURES,
    BASE_INDEX,
    FEATURE_NAMES,
    FEEDBACK_FEATURES,
    SLOT_FEATURES,
    SLOT_INDEX,
    check_codes,
    check_finite,
    check_signals,
    checks_on_device,
    feature_names,
    feature_specs,
    get_feature_size,
    refuse_unknown_stages,
    unknown_code_error,
)
from esper.tamiyo.policy.ratios import FEATURE_SETS


@pytest.mark.parametrize(("slots", "size"), [(1, 61), (3, 121), (5, 181), (8, 271)])
def test_an_observation_has_31_features_and_30_per_slot(slots: int, size: int) -> None:
    config = SlotConfig.of(slots)
    assert get_feature_size(config) == size
    assert len(feature_names(config)) == len(feature_specs(config)) == size
    assert len(set(feature_names(config))) == size


def test_the_default_layout_is_that_of_the_documents() -> None:
    assert len(FEATURE_NAMES) == 121
    assert (len(BASE_FEATURES), len(FEEDBACK_FEATURES), len(SLOT_FEATURES)) == (24, 7, 30)
    assert FEATURE_NAMES[:7] == (
        "epoch_progress",
        "loss_norm",
        "loss_delta_norm",
        "accuracy_norm",
        "accuracy_delta_norm",
        "plateau_norm",
        "host_stabilized",
    )
    assert FEATURE_NAMES[7:17] == (
        *[f"loss_history_{i}" for i in range(5)],
        *[f"acc_history_{i}" for i in range(5)],
    )
    assert FEATURE_NAMES[17:24] == (
        "best_accuracy_norm",
        "best_loss_norm",
        "params_utilization",
        "slot_utilization",
        "num_training",
        "num_blending",
        "num_holding",
    )
    assert FEATURE_NAMES[24] == "last_action_success"
    assert FEATURE_NAMES[25:31] == tuple(f"last_action_op_{op.name.lower()}" for op in LifecycleOp)
    assert FEATURE_NAMES[31] == "r0c0.is_active"
    assert FEATURE_NAMES[32:42] == tuple(f"r0c0.stage_{s.name.lower()}" for s in SeedStage)
    assert FEATURE_NAMES[42:61] == tuple(
        f"r0c0.{name}"
        for name in (
            "alpha",
            "alpha_target",
            "alpha_mode_norm",
            "alpha_velocity",
            "time_to_target_norm",
            "alpha_algorithm_norm",
            "contribution_norm",
            "contribution_velocity_norm",
            "epochs_in_stage_norm",
            "gradient_norm_norm",
            "gradient_health",
            "gradient_health_prev",
            "has_vanishing",
            "has_exploding",
            "interaction_sum_norm",
            "boost_received_norm",
            "upstream_alpha_norm",
            "downstream_alpha_norm",
            "counterfactual_fresh",
        )
    )
    assert FEATURE_NAMES[61] == "r0c1.is_active"
    assert FEATURE_NAMES[91] == "r0c2.is_active"


def test_names_follow_the_ids_of_the_slots() -> None:
    names = feature_names(SlotConfig(("r1c0", "r0c3")))
    assert names[31] == "r1c0.is_active"
    assert names[61 + SLOT_INDEX["alpha"]] == "r0c3.alpha"
    assert names[BASE_INDEX["num_holding"]] == "num_holding"


def test_every_feature_says_what_it_is() -> None:
    for spec in feature_specs(SlotConfig.default()):
        assert spec.formula
        assert -2.0 <= spec.low <= 0.0 < spec.high <= 2.0
        assert spec.unit > 0
        if spec.kind in ("flag", "one_hot"):
            assert (spec.low, spec.high, spec.unit) == (0.0, 1.0, 1.0)


def test_flags_one_hots_and_codes_are_marked_as_such() -> None:
    kinds = dict(
        zip(FEATURE_NAMES, [s.kind for s in feature_specs(SlotConfig.default())], strict=True)
    )
    assert sum(kind == "one_hot" for kind in kinds.values()) == 6 + 3 * 10
    flags = [name for name, kind in kinds.items() if kind == "flag"]
    assert flags[:2] == ["host_stabilized", "last_action_success"]
    assert [name for name in flags if name.startswith("r0c1.")] == [
        "r0c1.is_active",
        "r0c1.has_vanishing",
        "r0c1.has_exploding",
    ]
    codes = [name for name, kind in kinds.items() if kind == "code"]
    assert codes[:2] == ["r0c0.alpha_mode_norm", "r0c0.alpha_algorithm_norm"]
    assert len(codes) == 6


def test_debugging_is_a_matter_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    assert not is_debugging()
    assert checks_on_device(torch.device("cuda", 0))
    assert not checks_on_device(torch.device("cpu"))
    monkeypatch.setenv("ESPER_DEBUG", "1")
    assert is_debugging()
    assert not checks_on_device(torch.device("cuda", 0))
    monkeypatch.setenv("ESPER_DEBUG", "0")
    assert not is_debugging()


def test_the_documents_switch_checks_stages_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    monkeypatch.setenv("ESPER_DEBUG_STAGE", "1")
    assert not checks_on_device(torch.device("cuda", 0))
    assert not is_debugging()


def test_signals_of_a_real_lifecycle_pass() -> None:
    signals = middle_aged_hosts(32).signals()
    check_signals(signals)
    refuse_unknown_stages(signals)
    check_codes(signals, expected=3, found=3)


def test_a_wrong_count_leads_to_its_cause() -> None:
    signals = middle_aged_hosts(8).signals()
    row, slot = signals.occupied.nonzero()[2].tolist()
    stage = signals.stage.clone()
    stage[row, slot] = 5
    strange = dataclasses.replace(signals, stage=stage)
    message = f"row {row}, slot {slot}: no stage has the value 5"
    with pytest.raises(UsageError, match=message):
        check_codes(strange, expected=3, found=torch.tensor(2))
    with pytest.raises(UsageError, match=message):
        refuse_unknown_stages(strange)
    assert "does not exist" in str(unknown_code_error(signals))


def test_codes_and_measurements_must_make_sense() -> None:
    signals = middle_aged_hosts(8).signals()
    row, slot = signals.occupied.nonzero()[0].tolist()
    algorithm = signals.algorithm.clone()
    algorithm[row, slot] = 7
    with pytest.raises(UsageError, match=f"row {row}, slot {slot}: algorithm must be 0 to 2"):
        check_signals(dataclasses.replace(signals, algorithm=algorithm))
    measured = torch.isfinite(signals.contribution).nonzero()[0].tolist()
    age = signals.counterfactual_age.clone()
    age[measured[0], measured[1]] = -1
    with pytest.raises(UsageError, match="a seed has both or neither"):
        check_signals(dataclasses.replace(signals, counterfactual_age=age))


def test_a_lost_feature_is_named() -> None:
    check_finite(torch.zeros(2, 3), ["a", "b", "c"])
    features = torch.tensor([[0.0, 1.0], [0.0, math.inf]])
    with pytest.raises(NonFiniteError, match=r"row 1: feature 1 \(b\) is inf"):
        check_finite(features, ["a", "b"])


def test_every_curve_is_a_feature_of_some_layout() -> None:
    parts = [part for own in FEATURE_SETS.values() for part in (own.host, own.slot, own.pair)]
    specs = [spec for part in (BASE_FEATURES, SLOT_FEATURES, *parts) for spec in part]
    assert {spec.name for spec in specs if spec.is_curve} == _CURVES
    clock = ("epoch_progress", "progress", "budget_left", "rate_factor", "alpha", "params_grown")
    assert not any(spec.is_curve for spec in specs if spec.name in clock)
