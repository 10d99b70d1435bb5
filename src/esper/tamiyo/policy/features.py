"""Observation V3: from signals to the 121 numbers a policy reads.

`batch_obs_to_features` computes all rows of `Signals` at once, on their device. It also takes lists
of plain records, the form of the design documents, which `reference.py` computes row by row.
`layout.py` says what each index means.

The arithmetic is written once for NumPy (on a CPU) and PyTorch (on a GPU); `Workbench` holds what
differs. Raw values go into their columns; then each column is divided by its unit and clamped.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.leyline.config import is_checking_stages
from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import NUM_STAGES, STAGE_INDEX, SeedStage
from esper.tamiyo.policy.layout import (
    BASE_INDEX,
    FEATURE_NAMES,
    FRESHNESS_DECAY,
    NUM_BASE,
    NUM_FEEDBACK,
    NUM_PER_SLOT,
    SLOT_INDEX,
    check_codes,
    check_finite,
    check_signals,
    feature_names,
    feature_specs,
    get_feature_size,
    unknown_code_error,
)

if TYPE_CHECKING:
    from esper.tamiyo.policy.reference import HostReport, SlotReport


Array: TypeAlias = Any
"""An array of NumPy or a tensor."""


RawSignals = namedtuple(
    "RawSignals",
    "epoch max_epochs val_loss val_score best_loss best_score loss_history score_history "
    "plateau_epochs stabilized params budget last_op last_success enabled occupied stage blueprint "
    "alpha_mode algorithm alpha alpha_target alpha_velocity time_to_target epochs_in_stage "
    "counterfactual_age contribution contribution_velocity grad_norm grad_health grad_health_prev "
    "vanishing exploding interaction",
)
"""The signals an observation is made of; each is a field of `Signals`, as an `Array`."""

_read_fields = attrgetter(*RawSignals._fields)


@dataclass(frozen=True, slots=True)
class Workbench:
    """Constants for one number of slots on one device, and the array library used there.

    The methods hide the differences between NumPy and PyTorch; each uses the faster way.
    """

    xp: Any
    """`numpy` or `torch`."""
    device: torch.device
    stage_bits: Array
    """float32 [12, 11]: `is_active` and the one-hot of every value of a stage.

    The retired value has none, and neither has -1, which stands for the last row.
    """
    op_bits: Array
    """float32 [7, 6]: the one-hot of every op; none for -1."""
    held: Array
    """float32 [11 S, 4]: sums the stage bits of a row to records, TRAINING, BLENDING, HOLDING."""
    sides: Array
    """float32 [S, S, 2]: 1 where the first slot comes before the second, and where after it."""
    units: Array
    """float32 [D]."""
    low: Array
    """float32 [D]."""
    high: Array
    """float32 [D]."""
    zero: Array
    one: Array

    @property
    def is_numpy(self) -> bool:
        """Whether the arrays are NumPy's."""
        return self.xp is np

    def read(self, signals: Signals) -> RawSignals:
        """Return the signals in the form of this library; nothing is copied."""
        fields = _read_fields(signals)
        return RawSignals(*[field.numpy() for field in fields] if self.is_numpy else fields)

    def blank(self, rows: int) -> Array:
        """Return the observation of empty slots, to be written into."""
        shape = (rows, len(self.units))
        if self.is_numpy:
            return np.zeros(shape, np.float32)
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def look_up(self, table: Array, index: Array) -> Array:
        """Return the rows of a table; -1 is the last, what is out of range raises."""
        return table.take(index, 0) if self.is_numpy else table[index]

    def sum_and_most(self, interaction: Array) -> tuple[Array, Array]:
        """Return sum and maximum over the last axis."""
        if not self.is_numpy:
            return interaction.sum(-1), interaction.amax(-1)
        # NumPy is slow along a short last axis and quick along the first.
        moved = np.ascontiguousarray(interaction.transpose(2, 0, 1))
        return np.add.reduce(moved), np.maximum.reduce(moved)

    def around(self, weight: Array) -> Array:
        """Return [R, S, 2]: the weights [R, S] before each slot summed, and those after it."""
        rows, slots = weight.shape
        sides = self.sides[:slots, :slots]
        if self.is_numpy:
            return (weight @ sides.reshape(slots, -1)).reshape(rows, slots, 2)
        # Not a matrix product, which an accelerator may round.
        return (weight[:, :, None, None] * sides).sum(1)

    def tensor(self, array: Array) -> Tensor:
        """Return the array as a tensor that shares its memory."""
        return torch.from_numpy(array) if self.is_numpy else array


@lru_cache(maxsize=64)
def workbench(slots: int, device: torch.device) -> Workbench:
    """Return the workbench for this many slots on this device, made once."""
    return make_workbench(slots, device, np if device.type == "cpu" else torch)


def make_workbench(slots: int, device: torch.device, xp: Any) -> Workbench:
    """Return a new workbench that computes with this library."""
    specs = feature_specs(SlotConfig.of(slots))

    def table(values: Tensor) -> Array:
        return values.numpy() if xp is np else values.to(device)

    # They are cached, so they must be ordinary tensors even when made in inference mode.
    with torch.inference_mode(False):
        return Workbench(
            xp=xp,
            device=device,
            stage_bits=table(_stage_bits()),
            op_bits=table(F.pad(torch.eye(NUM_OPS), (0, 0, 0, 1))),
            held=table(_held_columns().repeat(slots, 1)),
            sides=table(_sides(slots)),
            units=table(torch.tensor([spec.unit for spec in specs])),
            low=table(torch.tensor([spec.low for spec in specs])),
            high=table(torch.tensor([spec.high for spec in specs])),
            zero=table(torch.tensor(0.0)),
            one=table(torch.tensor(1.0)),
        )


def _stage_bits() -> Tensor:
    bits = torch.zeros(max(SeedStage) + 2, 1 + NUM_STAGES)
    for stage in SeedStage:
        bits[stage, 0] = bits[stage, 1 + STAGE_INDEX[stage]] = 1.0
    return bits


def _held_columns() -> Tensor:
    columns = torch.zeros(1 + NUM_STAGES, 4)
    columns[0, 0] = 1.0
    for place, stage in enumerate((SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)):
        columns[1 + STAGE_INDEX[stage], 1 + place] = 1.0
    return columns


def _sides(slots: int) -> Tensor:
    ones = torch.ones(slots, slots)
    return torch.stack((ones.triu(1), ones.tril(-1)), dim=-1)


__all__ = [
    "FEATURE_NAMES",
    "batch_obs_to_features",
    "batch_obs_to_features_v3",
    "feature_names",
    "get_feature_size",
    "get_feature_size_v3",
]

get_feature_size_v3 = get_feature_size
"""Document 002's name of it; the size is that of document 000, 121 for three slots."""

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

    `(signals, slot_config, device)` computes all rows of `signals` together on their device, then
    copies the result to `device`. Signals may have fewer slots than the configuration; the missing
    ones are empty. `(batch_signals, batch_slot_reports, slot_config, device)` computes lists of
    plain records one by one, with the same result.
    """
    first = arguments[0] if arguments else named.get("signals")
    if isinstance(first, Signals):
        return signals_to_features(*arguments, **named)
    from esper.tamiyo.policy.reference import reports_to_features

    return reports_to_features(*arguments, **named)


batch_obs_to_features_v3 = batch_obs_to_features
"""Document 002's name of it."""


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
    xp, raw = bench.xp, bench.read(signals)
    active = raw.occupied & raw.enabled
    stage = xp.where(active, raw.stage, -1)
    blueprints = xp.where(active, raw.blueprint, -1)
    try:
        stage_bits = bench.look_up(bench.stage_bits, stage)
        op_bits = bench.look_up(bench.op_bits, raw.last_op)
    except IndexError:
        raise unknown_code_error(signals) from None
    # Every record has a stage and a blueprint and sets two stage bits; every op sets one bit.
    count = xp.count_nonzero
    check_codes(
        signals,
        expected=4 * count(active) + 2 * rows,
        found=count(stage >= 0)
        + count(stage_bits)
        + count(blueprints >= 0)
        + count(raw.last_op >= 0)
        + count(op_bits),
    )
    features = bench.blank(rows)
    _fill_host(features, raw, stage_bits, op_bits, bench)
    slot_part = features[:, _SLOTS_START : _SLOTS_START + NUM_PER_SLOT * slots]
    _fill_slots(slot_part.reshape(rows, slots, NUM_PER_SLOT), raw, active, stage_bits, bench)
    features /= bench.units
    xp.maximum(features, bench.low, out=features)
    xp.minimum(features, bench.high, out=features)

    observation, indices = bench.tensor(features), bench.tensor(blueprints)
    if is_checking_stages():
        check_signals(signals)
        check_finite(observation, feature_names(slot_config))
    if slots < slot_config.num_slots:
        indices = F.pad(indices, (0, slot_config.num_slots - slots), value=-1)
    if device is not None:
        observation, indices = observation.to(device), indices.to(device)
    return observation, indices


def _fill_slots(
    out: Array, raw: RawSignals, active: Array, stage_bits: Array, bench: Workbench
) -> None:
    """Write the raw values of every slot into [R, S, 30]; 0 where there is no record."""
    xp = bench.xp
    measured = active & (raw.contribution == raw.contribution)  # never measured is NaN
    weight = xp.where(measured, raw.alpha, 0.0)
    total, most = bench.sum_and_most(raw.interaction)
    freshness = xp.exp(raw.counterfactual_age * _LOG_DECAY)

    out[..., _STAGE_BITS] = stage_bits
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
    out[..., SLOT_INDEX["interaction_sum_norm"]] = total
    out[..., SLOT_INDEX["boost_received_norm"]] = most
    out[..., _AROUND] = bench.around(weight)
    out[..., SLOT_INDEX["counterfactual_fresh"]] = xp.where(measured, freshness, 0.0)
    out[~active] = 0.0


def _fill_host(
    out: Array, raw: RawSignals, stage_bits: Array, op_bits: Array, bench: Workbench
) -> None:
    """Write the raw values of every host and of its last action into the first columns."""
    xp = bench.xp
    rows, slots = raw.stage.shape
    known = raw.loss_history == raw.loss_history  # not yet there is NaN
    losses = xp.where(known, raw.loss_history, 0.0)
    score = _points(raw.val_score, bench)
    # Before the first epoch the loss counts as infinite, so its change clamps to the maximum.
    previous_loss = xp.where(known[:, -2], raw.loss_history[:, -2], math.inf)
    bits = slots * stage_bits.shape[-1]
    held = stage_bits.reshape(rows, bits) @ bench.held[:bits]
    enabled = xp.maximum(raw.enabled.sum(1), bench.one)

    out[:, BASE_INDEX["epoch_progress"]] = raw.epoch / raw.max_epochs
    out[:, BASE_INDEX["loss_norm"]] = xp.log1p(xp.maximum(raw.val_loss, bench.zero))
    out[:, BASE_INDEX["loss_delta_norm"]] = previous_loss - raw.val_loss
    out[:, BASE_INDEX["accuracy_norm"]] = score
    out[:, BASE_INDEX["plateau_norm"]] = raw.plateau_epochs
    out[:, BASE_INDEX["host_stabilized"]] = raw.stabilized
    out[:, _LOSSES] = xp.log1p(xp.maximum(losses, bench.zero))
    out[:, _SCORES] = xp.where(known, raw.score_history, 0.0)
    out[:, BASE_INDEX["best_accuracy_norm"]] = raw.best_score
    out[:, _SCORES_AND_BEST] = _points(out[:, _SCORES_AND_BEST], bench)
    out[:, BASE_INDEX["accuracy_delta_norm"]] = score - out[:, _PREVIOUS_SCORE]
    out[:, BASE_INDEX["best_loss_norm"]] = xp.log1p(xp.maximum(raw.best_loss, bench.zero))
    out[:, BASE_INDEX["params_utilization"]] = xp.log1p(raw.params) / xp.log1p(raw.budget)
    out[:, _HELD] = held / enabled[:, None]
    out[:, _SUCCESS] = raw.last_success
    out[:, _OP_BITS] = op_bits


def _span(index: Mapping[str, int], first: str, last: str) -> slice:
    """Return the columns from one name to another, both included."""
    return slice(index[first], index[last] + 1)


_SLOTS_START = NUM_BASE + NUM_FEEDBACK
_STAGE_BITS = _span(SLOT_INDEX, "is_active", "stage_resetting")
_AROUND = _span(SLOT_INDEX, "upstream_alpha_norm", "downstream_alpha_norm")
_HELD = _span(BASE_INDEX, "slot_utilization", "num_holding")
_LOSSES = _span(BASE_INDEX, "loss_history_0", "loss_history_4")
_SCORES = _span(BASE_INDEX, "acc_history_0", "acc_history_4")
_SCORES_AND_BEST = _span(BASE_INDEX, "acc_history_0", "best_accuracy_norm")
_PREVIOUS_SCORE = BASE_INDEX["acc_history_3"]
_SUCCESS = NUM_BASE
_OP_BITS = slice(NUM_BASE + 1, NUM_BASE + NUM_FEEDBACK)
_LOG_DECAY = math.log(FRESHNESS_DECAY)


def _points(score: Array, bench: Workbench) -> Array:
    """Return scores in points from 0 to 100.

    An accuracy is in points already. A score below zero is a negative loss and becomes
    100 * exp(-loss): for a cross-entropy, the mean likelihood of the truth.
    """
    xp = bench.xp
    likelihood = xp.exp(xp.minimum(score, bench.zero))
    return xp.where(score < 0.0, 100.0 * likelihood, score)
