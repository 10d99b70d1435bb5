"""The plateau rule: add a seed whenever the score has stopped rising, keep it if the score rose.

It is what Perforated AI's library does with its dendrites (wait until the validation score has not
improved for some epochs, add, train on, keep the addition only if the best score became better,
stop after some that did not), in the operations of this project. No ablation is asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.tamiyo.controllers.choices import WAIT, Choice, pack_choices
from esper.tamiyo.controllers.registry import read_settings, register_controller
from esper.tamiyo.controllers.row_view import RowView, check_rows, read_rows
from esper.tamiyo.controllers.tending import tend


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Config):
    """The constants of the plateau rule."""

    patience: int = option(5, "Epochs without progress after which a seed is added.", minimum=1)
    trial: int = option(
        3, "Epochs at full amplitude in which a seed has to better the best score.", minimum=0
    )
    min_gain: float = option(
        0.0, "A seed is kept if the best score rose by more than this, in points or loss."
    )
    failures: int = option(2, "Seeds that did not help after which no more are added.", minimum=1)
    blueprints: tuple[str, ...] = option(
        ("conv_heavy", "mlp", "attention"), "What is added: the first that fits the slot."
    )


@dataclass(slots=True)
class _Memory:
    """What is remembered of one row."""

    reference: float | None = None
    """Best score when the seed on trial was germinated."""
    failures: int = 0


@register_controller("plateau")
class PlateauController:
    """Adds one seed at a time, deepest slot first, on plateaus; keeps what bettered the score."""

    def __init__(self, context: ControllerContext, config: PlateauConfig | None = None) -> None:
        """Create the controller for the context's blueprints."""
        self.config = config or PlateauConfig()
        self._blueprints = context.find_blueprints(self.config.blueprints)
        self._rows: list[_Memory] = []

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> PlateauController:
        """Return the controller; `argument` may set constants, as in 'patience=3'."""
        return cls(context, read_settings("plateau", argument, PlateauConfig))

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Give every row an empty memory."""
        self._rows = [_Memory() for _ in range(rows)]

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return what the rule says for every row."""
        check_rows("rule", len(self._rows), signals)
        choices = []
        for index, row in enumerate(read_rows(signals, masks)):
            if row.rolled_back:
                self._rows[index] = _Memory()
            choices.append(self._decide(row, self._rows[index]))
        return pack_choices(choices, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of every row."""
        return {"rows": [asdict(memory) for memory in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory of every row."""
        self._rows = [_Memory(**row) for row in state["rows"]]

    def _decide(self, row: RowView, memory: _Memory) -> Choice:
        live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
        if not live:
            return self._germinate(row, memory)
        slot = live[0]
        if row.stage[slot] != SeedStage.HOLDING:
            return next(iter(tend(row, [slot])), WAIT)
        if row.epochs_in_stage[slot] < self.config.trial:
            return WAIT
        has_helped = memory.reference is not None and (
            row.best_score > memory.reference + self.config.min_gain
        )
        op = LifecycleOp.FOSSILIZE if has_helped else LifecycleOp.PRUNE
        if not row.legal[op][slot]:
            return WAIT
        if not has_helped:
            memory.failures += 1
        return {"op": op, "slot": slot}

    def _germinate(self, row: RowView, memory: _Memory) -> Choice:
        if memory.failures >= self.config.failures or row.plateau_epochs < self.config.patience:
            return WAIT
        for slot in reversed(range(len(row.stage))):
            if not row.legal[LifecycleOp.GERMINATE][slot]:
                continue
            for blueprint in self._blueprints:
                if row.fits[slot][blueprint]:
                    memory.reference = row.best_score
                    return {"op": LifecycleOp.GERMINATE, "slot": slot, "blueprint": blueprint}
        return WAIT
