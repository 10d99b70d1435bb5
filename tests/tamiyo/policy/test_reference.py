from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import AlphaAlgorithm, AlphaMode, SeedStage
from esper.tamiyo.policy.layout import FEATURE_NAMES
from esper.tamiyo.policy.reference import HostReport, SlotReport, plain_reports, reports_to_features
from esper.testing.controllers import random_signals

SLOTS = SlotConfig.default()


def host(**changes: Any) -> HostReport:
    told = {
        "epoch": 30,
        "max_epochs": 150,
        "val_loss": 1.0,
        "val_score": 60.0,
        "best_loss": 0.5,
        "best_score": 70.0,
        "loss_history": (1.4, 1.3, 1.2, 1.1, 1.0),
        "score_history": (52.0, 54.0, 56.0, 58.0, 60.0),
        "plateau_epochs": 4,
        "stabilized": True,
        "params": 6_418,
        "budget": 500_000,
    }
    return HostReport(**{**told, **changes})


def seed(stage: SeedStage = SeedStage.BLENDING, **changes: Any) -> SlotReport:
    return SlotReport(**{"stage": int(stage), "blueprint": 1, **changes})


def observe(report: HostReport, slots: dict[str, SlotReport] | None = None) -> dict[str, float]:
    features, _ = reports_to_features([report], [slots or {}], SLOTS)
    assert features.dtype == torch.float32
    return dict(zip(FEATURE_NAMES, features[0].tolist(), strict=True))


def test_the_host_by_hand() -> None:
    seen = observe(host())
    assert seen["epoch_progress"] == pytest.approx(0.2)
    assert seen["loss_norm"] == pytest.approx(math.log(2) / math.log(11))
    assert seen["loss_delta_norm"] == pytest.approx(0.05)
    assert seen["accuracy_norm"] == pytest.approx(0.6)
    assert seen["accuracy_delta_norm"] == pytest.approx(0.2)
    assert seen["plateau_norm"] == pytest.approx(0.2)
    assert seen["host_stabilized"] == 1.0
    assert seen["loss_history_0"] == pytest.approx(math.log(2.4) / math.log(11))
    assert seen["acc_history_4"] == pytest.approx(0.6)
    assert seen["best_accuracy_norm"] == pytest.approx(0.7)
    assert seen["best_loss_norm"] == pytest.approx(math.log(1.5) / math.log(11))
    assert seen["params_utilization"] == pytest.approx(math.log(6_419) / math.log(500_001))
    assert seen["last_action_success"] == seen["last_action_op_wait"] == 1.0
    assert all(value == 0.0 for name, value in seen.items() if name.startswith("r0c"))


def test_a_seed_by_hand() -> None:
    told = seed(
        alpha=0.5,
        alpha_target=0.7,
        alpha_mode=int(AlphaMode.UP),
        alpha_velocity=0.1,
        time_to_target=3,
        algorithm=int(AlphaAlgorithm.GATE),
        contribution=2.5,
        contribution_velocity=-1.0,
        counterfactual_age=10,
        epochs_in_stage=15,
        grad_norm=4.0,
        grad_health=0.9,
        grad_health_prev=0.8,
        vanishing=True,
        interactions={"r0c0": 1.0, "r0c2": 2.0},
    )
    neighbours = {
        "r0c0": seed(SeedStage.FOSSILIZED, alpha=1.0, contribution=1.0, counterfactual_age=0),
        "r0c2": seed(alpha=0.3),
    }
    seen = observe(
        host(last_op=int(LifecycleOp.PRUNE), last_success=False), {"r0c1": told} | neighbours
    )
    mine = {name.removeprefix("r0c1."): value for name, value in seen.items() if "r0c1." in name}
    expected = {
        "is_active": 1.0,
        "stage_blending": 1.0,
        "alpha": 0.5,
        "alpha_target": 0.7,
        "alpha_mode_norm": 0.5,
        "alpha_velocity": 0.1,
        "time_to_target_norm": 0.02,
        "alpha_algorithm_norm": 1.0,
        "contribution_norm": 0.25,
        "contribution_velocity_norm": -0.1,
        "epochs_in_stage_norm": 0.1,
        "gradient_norm_norm": 0.4,
        "gradient_health": 0.9,
        "gradient_health_prev": 0.8,
        "has_vanishing": 1.0,
        "interaction_sum_norm": 0.3,
        "boost_received_norm": 0.4,
        "upstream_alpha_norm": 1 / 3,
        "downstream_alpha_norm": 0.0,
        "counterfactual_fresh": 0.995**10,
    }
    assert mine == {name: pytest.approx(expected.get(name, 0.0)) for name in mine}
    assert seen["slot_utilization"] == 1.0
    assert seen["num_blending"] == pytest.approx(2 / 3)
    assert seen["r0c0.downstream_alpha_norm"] == pytest.approx(0.5 / 3)
    assert seen["r0c2.upstream_alpha_norm"] == pytest.approx(1.5 / 3)
    assert (seen["last_action_success"], seen["last_action_op_prune"]) == (0.0, 1.0)


def test_the_first_epoch_is_progress() -> None:
    first = {"epoch": 1, "loss_history": (2.3,), "score_history": (8.0,)}
    seen = observe(host(**first, val_loss=2.3, val_score=8.0))
    assert seen["loss_delta_norm"] == 1.0
    assert seen["accuracy_delta_norm"] == pytest.approx(0.8)
    assert [seen[f"loss_history_{i}"] for i in range(4)] == [0.0] * 4
    assert seen["loss_history_4"] > 0
    assert seen["acc_history_4"] == pytest.approx(0.08)


def test_slots_a_host_does_not_have_count_for_nothing() -> None:
    told = {"r0c0": seed(SeedStage.TRAINING), "r0c2": seed()}
    seen = observe(host(enabled=("r0c0", "r0c1")), told)
    assert seen["slot_utilization"] == seen["num_training"] == 0.5
    assert seen["num_blending"] == 0.0
    assert all(value == 0.0 for name, value in seen.items() if name.startswith("r0c2."))


def test_blueprints_travel_beside_the_features() -> None:
    told = {"r0c0": seed(blueprint=20), "r0c2": seed(blueprint=0)}
    _, blueprints = reports_to_features([host()], [told], SLOTS, "cpu")
    assert blueprints.dtype == torch.int64
    assert blueprints.tolist() == [[20, -1, 0]]


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="5 is retired"):
        observe(host(), {"r0c0": SlotReport(stage=5, blueprint=1)})
    with pytest.raises(UsageError, match="blueprint id of 0 or more, got -1"):
        observe(host(), {"r0c0": seed(blueprint=-1)})
    with pytest.raises(ValueError, match="9 is not a valid LifecycleOp"):
        observe(host(last_op=9))
    with pytest.raises(UsageError, match="unknown slot 'r9c9'"):
        observe(host(), {"r9c9": seed()})
    with pytest.raises(UsageError, match="1 host reports but slot reports of 2"):
        reports_to_features([host()], [{}, {}], SLOTS)


def test_records_say_what_the_tensors_say() -> None:
    signals, _ = random_signals(40, 3, torch.Generator().manual_seed(1))
    config = SlotConfig.of(5)
    hosts, slots = plain_reports(signals, config)
    assert len(hosts) == len(slots) == 40
    for row, (host, reports) in enumerate(zip(hosts, slots, strict=True)):
        assert host.epoch == int(signals.epoch[row])
        assert host.val_loss == float(signals.val_loss[row])
        known = int((~signals.loss_history[row].isnan()).sum())
        assert len(host.loss_history) == len(host.score_history) == known == min(host.epoch, 5)
        enabled = [name for i, name in enumerate(config.slot_ids[:3]) if signals.enabled[row, i]]
        assert list(host.enabled or ()) == enabled
        for index, name in enumerate(config.slot_ids[:3]):
            assert (name in reports) == bool(signals.occupied[row, index])
            if name not in reports:
                continue
            report = reports[name]
            assert report.stage == int(signals.stage[row, index])
            assert report.alpha == float(signals.alpha[row, index])
            contribution = float(signals.contribution[row, index])
            assert report.is_measured == (not math.isnan(contribution))
            assert (report.counterfactual_age is not None) == report.is_measured
            assert set(report.interactions or {}) == set(config.slot_ids[:3]) - {name}
