"""Controllers side by side: every one decides for some of the rows of one population."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import placeholder_actions
from esper.leyline.controller import Controller
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals


class RowControllers:
    """Shows each controller its own rows, as if there were no others.

    Args:
        parts: controllers with the rows they decide for, which together are all rows, each once.
    """

    def __init__(self, parts: Sequence[tuple[Controller, Sequence[int]]]) -> None:
        """Take the controllers; `reset` says where the rows are."""
        self._controllers = [controller for controller, _ in parts]
        self._rows = [torch.tensor(rows, dtype=torch.int64) for _, rows in parts]

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Reset every controller for its rows."""
        everyone = torch.cat(self._rows).sort().values
        assert torch.equal(everyone, torch.arange(rows)), "every row needs one controller"
        self._rows = [part.to(device) for part in self._rows]
        for controller, part in zip(self._controllers, self._rows, strict=True):
            controller.reset(len(part), device)

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return what every controller decides for its rows."""
        actions = placeholder_actions(signals.rows, masks.op.device)
        for controller, part in zip(self._controllers, self._rows, strict=True):
            own = part.to(masks.op.device)
            chosen = controller.act(
                signals.select(part.to(signals.stage.device)), masks.select(own)
            )
            for head, values in chosen.items():
                actions[head][own] = values.to(own.device)
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of every controller."""
        return {"parts": [controller.state_dict() for controller in self._controllers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory of every controller."""
        for controller, own in zip(self._controllers, state["parts"], strict=True):
            controller.load_state_dict(own)
