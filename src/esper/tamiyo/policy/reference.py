"""Observation V3 computed row by row from plain records: the readable reference.

This is the form of the design documents: a list of host records and, for each, its slots by id. It
shares no arithmetic with `features.py` and computes every feature by name; tests compare the two,
names included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import AlphaAlgorithm, AlphaMode, SeedStage, parse_stage
from esper.tamiyo.policy.layout import SLOT_FEATURES, feature_names


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """One host after an epoch, in plain numbers."""

    epoch: int
    max_epochs: int
    val_loss: float
    val_score: float
    best_loss: float
    best_score: float
    loss_history: tuple[float, ...]
    """Up to five epochs, newest last; the newest is the one just validated."""
    score_history: tuple[float, ...]
    """As many as losses."""
    plateau_epochs: int
    stabilized: bool
    params: int
    budget: int
    last_op: int = LifecycleOp.WAIT
    last_success: bool = True
    enabled: tuple[str, ...] | None = None
    """Ids of the slots this host has; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """The record in one slot, in plain numbers."""

    stage: int
    blueprint: int
    alpha: float = 0.0
    alpha_target: float = 0.0
    alpha_mode: int = AlphaMode.HOLD
    alpha_velocity: float = 0.0
    time_to_target: float = 0.0
    algorithm: int = AlphaAlgorithm.ADD
    contribution: float | None = None
    """None before the first ablation."""
    contribution_velocity: float | None = None
    counterfactual_age: int | None = None
    epochs_in_stage: int = 0
    grad_norm: float = 0.0
    grad_health: float = 1.0
    grad_health_prev: float = 1.0
    vanishing: bool = False
    exploding: bool = False
    interactions: Mapping[str, float] | None = None
    """Points gained together with the seed in another slot, by its id."""

    @property
    def is_measured(self) -> bool:
        """Whether an ablation has been done."""
        return self.contribution is not None


def plain_reports(
    signals: Signals, slot_config: SlotConfig
) -> tuple[list[HostReport], list[dict[str, SlotReport]]]:
    """Return the rows of `signals` as plain records."""
    hosts, slots = [], []
    plain = {name: getattr(signals, name).tolist() for name in Signals.__dataclass_fields__}
    names = slot_config.slot_ids[: signals.num_slots]
    for row in range(signals.rows):
        values = {name: column[row] for name, column in plain.items()}
        enabled = tuple(name for name, on in zip(names, values["enabled"], strict=True) if on)
        given = {
            "loss_history": tuple(x for x in values["loss_history"] if not math.isnan(x)),
            "score_history": tuple(x for x in values["score_history"] if not math.isnan(x)),
            "enabled": enabled,
        }
        hosts.append(HostReport(**{name: values[name] for name in _HOST_FIELDS} | given))
        slots.append(
            {
                name: _slot_report(values, index, names)
                for index, name in enumerate(names)
                if values["occupied"][index]
            }
        )
    return hosts, slots


_HOST_FIELDS = tuple(field.name for field in dataclasses.fields(HostReport))
_SLOT_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SlotReport)
    if field.name
    not in ("contribution", "contribution_velocity", "counterfactual_age", "interactions")
)
"""Fields that have the value of the signal of the same name."""


def _slot_report(values: Mapping[str, Any], index: int, names: Sequence[str]) -> SlotReport:
    age = values["counterfactual_age"][index]
    together = zip(names, values["interaction"][index], strict=True)
    return SlotReport(
        **{name: values[name][index] for name in _SLOT_FIELDS},
        contribution=_known(values["contribution"][index]),
        contribution_velocity=_known(values["contribution_velocity"][index]),
        counterfactual_age=None if age < 0 else age,
        interactions={name: value for name, value in together if name != names[index]},
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def reports_to_features(
    batch_signals: Sequence[HostReport],
    batch_slot_reports: Sequence[Mapping[str, SlotReport]],
    slot_config: SlotConfig,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return float32 [N, D] and int64 [N, S] for one host and its slots per row."""
    if len(batch_signals) != len(batch_slot_reports):
        raise UsageError(
            f"got {len(batch_signals)} host reports but slot reports of {len(batch_slot_reports)}"
        )
    names = feature_names(slot_config)
    features, blueprints = [], []
    for host, reports in zip(batch_signals, batch_slot_reports, strict=True):
        present = _enabled_reports(host, reports, slot_config)
        row = _base_features(host, present, slot_config)
        for slot in slot_config.slot_ids:
            own = _slot_features(slot, present, host, slot_config)
            row |= {f"{slot}.{name}": value for name, value in own.items()}
        features.append([row[name] for name in names])
        blueprints.append([_blueprint(present.get(slot)) for slot in slot_config.slot_ids])
    return (
        torch.tensor(features, dtype=torch.float32, device=device),
        torch.tensor(blueprints, dtype=torch.int64, device=device),
    )


def _enabled_reports(
    host: HostReport, reports: Mapping[str, SlotReport], slot_config: SlotConfig
) -> dict[str, SlotReport]:
    """Return the records of the enabled slots, in the order of the slots."""
    for slot in (*reports, *(host.enabled or ())):
        slot_config.index(slot)
    enabled = slot_config.slot_ids if host.enabled is None else host.enabled
    return {
        slot: reports[slot] for slot in slot_config.slot_ids if slot in reports and slot in enabled
    }


def _base_features(
    host: HostReport, reports: Mapping[str, SlotReport], slot_config: SlotConfig
) -> dict[str, float]:
    enabled = slot_config.num_slots if host.enabled is None else len(host.enabled)
    stages = [parse_stage(report.stage) for report in reports.values()]
    last_op = LifecycleOp(host.last_op)
    features = {
        "epoch_progress": host.epoch / host.max_epochs,
        "loss_norm": _loss(host.val_loss),
        "loss_delta_norm": 1.0,
        "accuracy_norm": _points(host.val_score) / 100,
        "accuracy_delta_norm": _clamp(_points(host.val_score), -10, 10) / 10,
        "plateau_norm": _clamp(host.plateau_epochs, 0, 20) / 20,
        "host_stabilized": float(host.stabilized),
        "best_accuracy_norm": _points(host.best_score) / 100,
        "best_loss_norm": _loss(host.best_loss),
        "params_utilization": min(math.log(1 + host.params) / math.log(1 + host.budget), 1.0),
        "slot_utilization": len(reports) / max(enabled, 1),
        "num_training": stages.count(SeedStage.TRAINING) / max(enabled, 1),
        "num_blending": stages.count(SeedStage.BLENDING) / max(enabled, 1),
        "num_holding": stages.count(SeedStage.HOLDING) / max(enabled, 1),
        "last_action_success": float(host.last_success),
        **{f"last_action_op_{op.name.lower()}": float(op is last_op) for op in LifecycleOp},
    }
    if len(host.loss_history) > 1:
        fall = host.loss_history[-2] - host.val_loss
        rise = _points(host.val_score) - _points(host.score_history[-2])
        features["loss_delta_norm"] = _clamp(fall, -2, 2) / 2
        features["accuracy_delta_norm"] = _clamp(rise, -10, 10) / 10
    missing = HISTORY - len(host.loss_history)
    for i in range(HISTORY):
        known = i >= missing
        features[f"loss_history_{i}"] = _loss(host.loss_history[i - missing]) if known else 0.0
        features[f"acc_history_{i}"] = (
            _points(host.score_history[i - missing]) / 100 if known else 0.0
        )
    return features


def _slot_features(
    slot: str, reports: Mapping[str, SlotReport], host: HostReport, slot_config: SlotConfig
) -> dict[str, float]:
    report = reports.get(slot)
    if report is None:
        return {spec.name: 0.0 for spec in SLOT_FEATURES}
    stage = parse_stage(report.stage)
    place = slot_config.index(slot)
    measured = {
        slot_config.index(other): neighbour.alpha
        for other, neighbour in reports.items()
        if neighbour.is_measured
    }
    together = list((report.interactions or {}).values())
    return {
        "is_active": 1.0,
        **{f"stage_{each.name.lower()}": float(stage is each) for each in SeedStage},
        "alpha": report.alpha,
        "alpha_target": report.alpha_target,
        "alpha_mode_norm": list(AlphaMode).index(AlphaMode(report.alpha_mode)) / 2,
        "alpha_velocity": _clamp(report.alpha_velocity, -1, 1),
        "time_to_target_norm": _clamp(report.time_to_target, 0, host.max_epochs) / host.max_epochs,
        "alpha_algorithm_norm": list(AlphaAlgorithm).index(AlphaAlgorithm(report.algorithm)) / 2,
        "contribution_norm": _clamp(report.contribution or 0.0, -10, 10) / 10,
        "contribution_velocity_norm": _clamp(report.contribution_velocity or 0.0, -10, 10) / 10,
        "epochs_in_stage_norm": _clamp(report.epochs_in_stage, 0, 150) / 150,
        "gradient_norm_norm": _clamp(report.grad_norm, 0, 10) / 10,
        "gradient_health": report.grad_health,
        "gradient_health_prev": report.grad_health_prev,
        "has_vanishing": float(report.vanishing),
        "has_exploding": float(report.exploding),
        "interaction_sum_norm": _clamp(sum(together), 0, 10) / 10,
        "boost_received_norm": _clamp(max(together, default=0.0), 0, 5) / 5,
        "upstream_alpha_norm": _clamp(sum(a for i, a in measured.items() if i < place), 0, 3) / 3,
        "downstream_alpha_norm": _clamp(sum(a for i, a in measured.items() if i > place), 0, 3) / 3,
        # A measurement fades to a half in about 138 epochs.
        "counterfactual_fresh": report.is_measured * 0.995 ** (report.counterfactual_age or 0),
    }


def _blueprint(report: SlotReport | None) -> int:
    if report is None:
        return -1
    if report.blueprint < 0:
        raise UsageError(f"a record needs a blueprint id of 0 or more, got {report.blueprint}")
    return report.blueprint


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def _loss(loss: float) -> float:
    return min(math.log(1 + max(loss, 0.0)) / math.log(11), 2.0)


def _points(score: float) -> float:
    """Return an accuracy as it is, and a negative loss as 100 times the likelihood it means."""
    return 100.0 * math.exp(score) if score < 0 else _clamp(score, 0.0, 100.0)
