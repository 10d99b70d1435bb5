"""A trace: what happened in every step of a round, as tensors over rows and steps.

Everything is kept where it was computed, in memory set aside once, and read back once when the
round is over; so that writing down what all rows did costs a few copies per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, UsageError


class Trace:
    """Named tensors [rows, steps, ...], filled step by step.

    The first `put` of a round under a name fixes its shape and type; steps of a name that were
    never put are zero.

    Args:
        rows: number of rows.
        steps: most steps of a round.
    """

    def __init__(self, rows: int, steps: int) -> None:
        """Start empty."""
        self.rows, self.steps = rows, steps
        self.length = 0
        self._kept: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin a new round; memory is used again."""
        self.length = 0
        for tensor in self._kept.values():
            tensor.zero_()

    def put(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Keep one tensor [rows, ...] per name as the values of a step."""
        if not 0 <= step < self.steps:
            raise UsageError(f"a trace of {self.steps} steps has no step {step}")
        for name, value in values.items():
            kept = self._kept.get(name)
            if kept is None or (self.length == 0 and kept.shape[2:] != value.shape[1:]):
                kept = value.new_zeros((self.rows, self.steps, *value.shape[1:]))
                self._kept[name] = kept
            kept[:, step] = value
        self.length = max(self.length, step + 1)

    def read(self) -> dict[str, Tensor]:
        """Return copies on the CPU, [rows, length, ...], of everything so far."""
        return {name: kept[:, : self.length].cpu().clone() for name, kept in self._kept.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what was put so far."""
        return {"length": self.length, "kept": self.read()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` returned; tensors go to this device."""
        self._kept = {}
        self.length = int(state["length"])
        if self.length > self.steps:
            raise CheckpointError(
                f"the saved round has {self.length} steps, this one has at most {self.steps}"
            )
        for name, saved in state["kept"].items():
            if len(saved) != self.rows:
                raise CheckpointError(
                    f"the saved round has {len(saved)} rows, this one has {self.rows}"
                )
            shape = (self.rows, self.steps, *saved.shape[2:])
            kept = torch.zeros(shape, dtype=saved.dtype, device=device)
            kept[:, : self.length] = saved.to(device)
            self._kept[name] = kept
