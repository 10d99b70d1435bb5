"""The controller that never acts: what every other one has to beat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.leyline.controller import ControllerContext
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.choices import WAIT, pack_choices
from esper.tamiyo.controllers.registry import refuse_argument, register_controller


@register_controller("wait")
class WaitController:
    """Waits in every row at every step; it has no memory."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> WaitController:
        """Return the controller; it takes no argument and needs nothing of the context."""
        refuse_argument("wait", argument)
        return cls()

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Do nothing: there is nothing to forget."""

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return WAIT for every row."""
        return pack_choices([WAIT] * masks.rows, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the empty memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is nothing to restore."""
