"""Observation V3: from signals to the 121 numbers a policy reads.

`batch_obs_to_features` works on `Signals` of any number of rows at once, where they are, without a
loop over rows or slots. It also takes lists of plain records, the form of the design documents,
which `reference.py` computes row by row. What each index means is in `layout.py`.

The arithmetic is written once, for arrays of NumPy and tensors of PyTorch alike (`arrays.py`): raw
values go into their columns, and at the end every column is divided by its unit and clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.arrays import Array, RawSignals, Workbench, workbench
from esper.tamiyo.policy.checks import (
    check_finite,
    check_signals,
    is_debugging,
    refuse_strangers,
)
from esper.tamiyo.policy.layout import (
    BASE_INDEX,
    FEATURE_NAMES,
    FRESHNESS_DECAY,
    NUM_BASE,
    NUM_FEEDBACK,
    NUM_PER_SLOT,
    SLOT_INDEX,
    feature_names,
    get_feature_size,
)
from esper.tamiyo.policy.reference import HostReport, SlotReport, reports_to_features

__all__ = ["FEATURE_NAMES", "batch_obs_to_features", "feature_names", "get_feature_size"]

Features = tuple[Tensor, Tensor]
"""The observation, float32 [N, D], and the blueprint indices, int64 [N, S], -1 where empty."""


@overload
def batch_obs_to_features(
    signals: Signals, slot_config: SlotConfig, device: torch.device | str | None = None
) -> Features: ...


@overload
def batch_obs_to_features(
    batch_signals: Sequence[HostReport],
    batch_slot_reports: Sequence[Mapping[str, SlotReport]],
    slot_config: SlotConfig,
    device: torch.device | str | None = None,
) -> Features: ...


def batch_obs_to_features(*arguments: Any, **named: Any) -> Features:
    """Return the observation of every row, and the blueprint of every slot.

    With `(signals, slot_config, device)` the rows of `signals` are computed together, on their
    device; the result is copied once where `device` is another. Signals may have fewer slots than
    the configuration: the missing ones are empty. With `(batch_signals, batch_slot_reports,
    slot_config, device)` lists of plain records are computed one by one, to the same numbers.
    """
    first = arguments[0] if arguments else named.get("signals")
    if isinstance(first, Signals):
        return signals_to_features(*arguments, **named)
    return reports_to_features(*arguments, **named)


def signals_to_features(
    signals: Signals, slot_config: SlotConfig, device: torch.device | str | None = None
) -> Features:
    """Return the observation of every row of `signals`; see `batch_obs_to_features`."""
    rows, slots = signals.stage.shape
    if slots > slot_config.num_slots:
        raise UsageError(
            f"the signals have {slots} slots, but the observation is laid out for "
            f"{slot_config.num_slots}; use SlotConfig.of({slots}) or more"
        )
    bench = workbench(slot_config.num_slots, signals.stage.device)
    raw = bench.read(signals)
    features, blueprints = bench.blank(rows)
    host = features[:, :_SLOTS_START]
    own = features[:, _SLOTS_START:].reshape(rows, slot_config.num_slots, NUM_PER_SLOT)[:, :slots]

    xp = bench.xp
    active = raw.occupied & raw.enabled
    stages = (raw.stage[..., None] == bench.stages) & active[..., None]
    last_op = raw.last_op[:, None] == bench.ops
    blueprints[:, :slots] = xp.where(active, raw.blueprint, -1)
    refuse_strangers(
        signals,
        expected=2 * xp.count_nonzero(active) + rows,
        found=xp.count_nonzero(stages)
        + xp.count_nonzero(blueprints >= 0)
        + xp.count_nonzero(last_op),
    )
    own[..., SLOT_INDEX["is_active"]] = active
    own[..., _STAGE] = stages
    _fill_slots(own, raw, active, bench)
    _fill_host(host, raw, own, bench)
    host[:, _OP] = last_op
    features /= bench.units
    xp.maximum(features, bench.low, out=features)
    xp.minimum(features, bench.high, out=features)

    observation, indices = bench.tensor(features), bench.tensor(blueprints)
    if is_debugging():
        check_signals(signals)
        check_finite(observation, feature_names(slot_config))
    if device is not None:
        observation, indices = observation.to(device), indices.to(device)
    return observation, indices


def _fill_slots(out: Array, raw: RawSignals, active: Array, bench: Workbench) -> None:
    """Write the raw values of every slot into [R, S, 30]; 0 where there is no record."""
    xp, slots = bench.xp, active.shape[1]
    measured = active & (raw.contribution == raw.contribution)  # never measured is NaN
    weight = xp.where(measured, raw.alpha, 0.0)
    # [R, 2, S]: the amplitudes before each slot, and those after it.
    around = (weight[:, None, None] * bench.sides[:, :slots, :slots]).sum(-1)
    freshness = xp.exp(raw.counterfactual_age * _LOG_DECAY)

    out[..., SLOT_INDEX["alpha"]] = raw.alpha
    out[..., SLOT_INDEX["alpha_target"]] = raw.alpha_target
    out[..., SLOT_INDEX["alpha_mode_norm"]] = raw.alpha_mode
    out[..., SLOT_INDEX["alpha_velocity"]] = raw.alpha_velocity
    out[..., SLOT_INDEX["time_to_target_norm"]] = raw.time_to_target / raw.max_epochs[:, None]
    out[..., SLOT_INDEX["alpha_algorithm_norm"]] = raw.algorithm
    out[..., SLOT_INDEX["contribution_norm"]] = xp.where(measured, raw.contribution, 0.0)
    out[..., SLOT_INDEX["contribution_velocity_norm"]] = xp.where(
        measured, raw.contribution_velocity, 0.0
    )
    out[..., SLOT_INDEX["epochs_in_stage_norm"]] = raw.epochs_in_stage
    out[..., SLOT_INDEX["gradient_norm_norm"]] = raw.grad_norm
    out[..., SLOT_INDEX["gradient_health"]] = raw.grad_health
    out[..., SLOT_INDEX["gradient_health_prev"]] = raw.grad_health_prev
    out[..., SLOT_INDEX["has_vanishing"]] = raw.vanishing
    out[..., SLOT_INDEX["has_exploding"]] = raw.exploding
    out[..., SLOT_INDEX["interaction_sum_norm"]] = raw.interaction.sum(-1)
    out[..., SLOT_INDEX["boost_received_norm"]] = xp.amax(raw.interaction, -1)
    out[..., _AROUND] = around.swapaxes(1, 2)
    out[..., SLOT_INDEX["counterfactual_fresh"]] = xp.where(measured, freshness, 0.0)
    out[..., 1:] *= out[..., :1]


def _fill_host(out: Array, raw: RawSignals, slots: Array, bench: Workbench) -> None:
    """Write the raw values of every host and of its last action into [R, 31]."""
    xp = bench.xp
    known = raw.loss_history == raw.loss_history  # not yet there is NaN
    losses = xp.where(known, raw.loss_history, 0.0)
    points = _points(xp.where(known, raw.score_history, 0.0), bench)
    score = _points(raw.val_score, bench)
    # Nothing came before the first epoch, and whatever it brought is progress.
    previous_loss = xp.where(known[:, -2], raw.loss_history[:, -2], math.inf)
    # How many slots hold a record, and how many a seed in each of the first stages.
    held = slots[..., : _HELD_STAGES.stop].sum(1)
    held /= xp.maximum(raw.enabled.sum(1), bench.one)[:, None]

    out[:, BASE_INDEX["epoch_progress"]] = raw.epoch / raw.max_epochs
    out[:, BASE_INDEX["loss_norm"]] = xp.log1p(xp.maximum(raw.val_loss, bench.zero))
    out[:, BASE_INDEX["loss_delta_norm"]] = previous_loss - raw.val_loss
    out[:, BASE_INDEX["accuracy_norm"]] = score
    out[:, BASE_INDEX["accuracy_delta_norm"]] = score - points[:, -2]
    out[:, BASE_INDEX["plateau_norm"]] = raw.plateau_epochs
    out[:, BASE_INDEX["host_stabilized"]] = raw.stabilized
    out[:, _LOSSES] = xp.log1p(xp.maximum(losses, bench.zero))
    out[:, _SCORES] = points
    out[:, BASE_INDEX["best_accuracy_norm"]] = _points(raw.best_score, bench)
    out[:, BASE_INDEX["best_loss_norm"]] = xp.log1p(xp.maximum(raw.best_loss, bench.zero))
    out[:, BASE_INDEX["params_utilization"]] = xp.log1p(raw.params) / xp.log1p(raw.budget)
    out[:, BASE_INDEX["slot_utilization"]] = held[:, 0]
    out[:, _HELD] = held[:, _HELD_STAGES]
    out[:, _SUCCESS] = raw.last_success


def _span(index: Mapping[str, int], first: str, last: str) -> slice:
    """Return the columns from one name to another, both included."""
    return slice(index[first], index[last] + 1)


_SLOTS_START = NUM_BASE + NUM_FEEDBACK
_STAGE = _span(SLOT_INDEX, "stage_unknown", "stage_resetting")
_AROUND = _span(SLOT_INDEX, "upstream_alpha_norm", "downstream_alpha_norm")
_HELD_STAGES = _span(SLOT_INDEX, "stage_training", "stage_holding")
_HELD = _span(BASE_INDEX, "num_training", "num_holding")
_LOSSES = _span(BASE_INDEX, "loss_history_0", "loss_history_4")
_SCORES = _span(BASE_INDEX, "acc_history_0", "acc_history_4")
_SUCCESS = NUM_BASE
_OP = slice(NUM_BASE + 1, NUM_BASE + NUM_FEEDBACK)
_LOG_DECAY = math.log(FRESHNESS_DECAY)


def _points(score: Array, bench: Workbench) -> Array:
    """Return scores in points from 0 to 100.

    An accuracy is in points already. A score below zero is a negative loss; 100 * exp(-loss) is
    the mean likelihood of the truth where the loss is a cross-entropy, grows as the loss falls,
    and is 100 at no loss at all.
    """
    xp = bench.xp
    likelihood = xp.exp(xp.minimum(score, bench.zero))
    return xp.where(score < 0.0, 100.0 * likelihood, score)
