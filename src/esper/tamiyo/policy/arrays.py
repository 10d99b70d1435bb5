"""The arrays an observation is computed with: NumPy's on the CPU, PyTorch's elsewhere.

The formulas of `features.py` use the subset both libraries share, and a `Workbench` for the rest.
In the memory of the CPU, NumPy works on the signals themselves, at about half the cost per
operation; on an accelerator PyTorch does, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import NUM_OPS
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import NUM_STAGES, STAGE_INDEX, SeedStage
from esper.tamiyo.policy.layout import feature_specs

Array: TypeAlias = Any
"""An array of NumPy or a tensor."""


class RawSignals(NamedTuple):
    """The signals an observation is made of; each is a field of `Signals`."""

    epoch: Array
    max_epochs: Array
    val_loss: Array
    val_score: Array
    best_loss: Array
    best_score: Array
    loss_history: Array
    score_history: Array
    plateau_epochs: Array
    stabilized: Array
    params: Array
    budget: Array
    last_op: Array
    last_success: Array
    enabled: Array
    occupied: Array
    stage: Array
    blueprint: Array
    alpha_mode: Array
    algorithm: Array
    alpha: Array
    alpha_target: Array
    alpha_velocity: Array
    time_to_target: Array
    epochs_in_stage: Array
    counterfactual_age: Array
    contribution: Array
    contribution_velocity: Array
    grad_norm: Array
    grad_health: Array
    grad_health_prev: Array
    vanishing: Array
    exploding: Array
    interaction: Array


_read_fields = attrgetter(*RawSignals._fields)


@dataclass(frozen=True, slots=True)
class Workbench:
    """Constants for one number of slots on one device, and the library that computes there.

    The methods are what the two libraries do differently, each in the way that is quick in its own.
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

    # Kept for ever, so they must be ordinary tensors even when first made while inferring.
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
