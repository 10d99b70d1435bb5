"""The arrays an observation is computed with: NumPy's on the CPU, PyTorch's elsewhere.

The formulas of `features.py` use the subset both libraries share. In the memory of the CPU, NumPy
works on the signals themselves, at about half the cost per operation; on an accelerator PyTorch
does, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
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
    """Constants for one number of slots on one device, and the library that computes there."""

    xp: Any
    """`numpy` or `torch`."""
    slots: int
    device: torch.device
    stages: Array
    """int64 [10], the value of every stage in the order of the one-hot."""
    ops: Array
    """int64 [6]."""
    sides: Array
    """float32 [2, S, S]: 1 where the last slot comes before the middle one, and where after it."""
    units: Array
    """float32 [D]."""
    low: Array
    """float32 [D]."""
    high: Array
    """float32 [D]."""
    zero: Array
    one: Array

    def read(self, signals: Signals) -> RawSignals:
        """Return the signals in the form of this library; nothing is copied."""
        fields = _read_fields(signals)
        return RawSignals._make(map(Tensor.numpy, fields) if self.xp is np else fields)

    def blank(self, rows: int) -> tuple[Array, Array]:
        """Return features and blueprint indices of empty slots, to be written into."""
        size = len(self.units)
        if self.xp is np:
            features: Array = np.zeros((rows, size), np.float32)
            return features, np.full((rows, self.slots), -1, np.int64)
        features = torch.zeros((rows, size), dtype=torch.float32, device=self.device)
        return features, torch.full((rows, self.slots), -1, dtype=torch.int64, device=self.device)

    def tensor(self, array: Array) -> Tensor:
        """Return the array as a tensor that shares its memory."""
        return torch.from_numpy(array) if self.xp is np else array


@lru_cache(maxsize=64)
def workbench(slots: int, device: torch.device) -> Workbench:
    """Return the workbench for this many slots on this device, made once."""
    specs = feature_specs(SlotConfig.of(slots))
    is_numpy = device.type == "cpu"

    def table(values: Sequence[Any] | float, dtype: torch.dtype = torch.float32) -> Array:
        # Kept for ever, so it must be an ordinary tensor even when first made while inferring.
        with torch.inference_mode(False):
            tensor = torch.tensor(values, dtype=dtype, device=device)
        return tensor.numpy() if is_numpy else tensor

    order = range(slots)
    return Workbench(
        xp=np if is_numpy else torch,
        slots=slots,
        device=device,
        stages=table([int(stage) for stage in SeedStage], torch.int64),
        ops=table([int(op) for op in LifecycleOp], torch.int64),
        sides=table(
            [
                [[float(other < slot) for other in order] for slot in order],
                [[float(other > slot) for other in order] for slot in order],
            ]
        ),
        units=table([spec.unit for spec in specs]),
        low=table([spec.low for spec in specs]),
        high=table([spec.high for spec in specs]),
        zero=table(0.0),
        one=table(1.0),
    )
