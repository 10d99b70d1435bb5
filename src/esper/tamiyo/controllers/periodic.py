"""The controller that grows by the clock: what adding something now and then is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.choices import WAIT, Choice, pack_choices
from esper.tamiyo.controllers.random import draw_choice
from esper.tamiyo.controllers.registry import read_settings, register_controller
from esper.tamiyo.controllers.row_view import read_rows
from esper.tamiyo.controllers.tending import first_untried, tend


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(Config):
    """How often it germinates."""

    every: int = option(10, "Epochs from one germination to the next.", minimum=1)


@register_controller("periodic")
class PeriodicController:
    """Germinates a random legal seed every few epochs, advances it and fossilizes it, unjudged.

    A draw depends on the seed, the row and the epoch alone.
    """

    def __init__(self, seed: int = 0, config: PeriodicConfig | None = None) -> None:
        """Create the controller; `seed` names its stream of draws."""
        self.config = config or PeriodicConfig()
        self._seed = seed
        self._tried: list[dict[str, int] | None] = []

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> PeriodicController:
        """Return the controller for this run's seed; `argument` may be 'every=K'."""
        return cls(context.seed, read_settings("periodic", argument, PeriodicConfig))

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Forget what was tried last."""
        self._tried = [None] * rows

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return what brings a seed further, or at its time a new one."""
        on_cpu = masks.to("cpu")
        choices = []
        for index, row in enumerate(read_rows(signals, masks)):
            tried = self._tried[index]
            has_failed = tried is not None and row.last_op == tried["op"] and not row.last_success
            wishes = tend(row, range(len(row.stage)))
            if row.epoch % self.config.every == 0 and any(row.legal[LifecycleOp.GERMINATE]):
                key = (self._seed, index, row.epoch)
                wishes.append(draw_choice(on_cpu, index, LifecycleOp.GERMINATE, key))
            chosen: Choice | None = first_untried(wishes, tried if has_failed else None)
            self._tried[index] = None if chosen is None else dict(chosen)
            choices.append(WAIT if chosen is None else chosen)
        return pack_choices(choices, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return what was tried last."""
        return {"tried": [None if each is None else dict(each) for each in self._tried]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was tried last."""
        self._tried = [None if each is None else dict(each) for each in state["tried"]]
