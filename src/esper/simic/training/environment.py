"""What the training loop trains on: anything that behaves like a `Population`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from esper.leyline.actions import Actions
from esper.leyline.masks import Masks
from esper.leyline.signals import Signals


class Environment(Protocol):
    """Rows of evolving hosts: `esper.Population`, or a problem whose optimum is known."""

    rows: int
    """Number of rows."""
    num_slots: int
    """Slots of the row with the most of them."""
    device: torch.device
    """Where signals come from."""

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Build every row afresh, from these seeds if any are given, and live one epoch."""
        ...

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and live through the epoch that follows."""
        ...

    def masks(self) -> Masks:
        """Return what is legal now."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        ...

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot."""
        ...

    def close(self) -> None:
        """Free what must be freed by hand."""
        ...
