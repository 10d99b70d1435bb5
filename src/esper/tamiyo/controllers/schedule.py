"""The controller that carries out a schedule: the same operations, in the same order, every run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, PLACEHOLDERS, LifecycleOp
from esper.leyline.alpha import AlphaAlgorithm, BlendStyle
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EsperWarning, UsageError
from esper.leyline.masks import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.choices import WAIT, Choice, is_legal, pack_choices
from esper.tamiyo.controllers.registry import register_controller
from esper.tamiyo.controllers.schedule_file import Entry, load_schedule

_STYLE_OF_ALGORITHM = {
    int(AlphaAlgorithm.ADD): BlendStyle.SIGMOID_ADD,
    int(AlphaAlgorithm.MULTIPLY): BlendStyle.LINEAR_MULTIPLY,
    int(AlphaAlgorithm.GATE): BlendStyle.GATED_GATE,
}
"""A style that leaves the seed's algorithm as it is."""


@register_controller("schedule")
class ScheduleController:
    """Carries out entries in order; every row follows the same schedule at its own pace.

    An entry starts at its epoch at the earliest. While it is illegal, or when its gate fails, it
    waits and is tried again, and the entries after it wait too.
    """

    def __init__(self, entries: Sequence[Entry], context: ControllerContext) -> None:
        """Create the controller for entries that `load_schedule` returned."""
        self._entries = tuple(entries)
        self._context = context
        self._next: list[int] = []
        self._tried: list[bool] = []

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> ScheduleController:
        """Return the controller for the schedule in the file that `argument` names."""
        if not argument:
            raise UsageError("controller 'schedule' needs a file; write 'schedule:plan.yaml'")
        return cls(load_schedule(argument, context), context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start the schedule again in every row."""
        self._next = [0] * rows
        self._tried = [False] * rows

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return each row's next entry where its time has come and it is legal, else WAIT."""
        if signals.rows != len(self._next):
            raise UsageError(
                f"the schedule was reset for {len(self._next)} rows but is shown {signals.rows}; "
                f"call reset({signals.rows}, device) first"
            )
        epochs, algorithms = signals.epoch.tolist(), signals.algorithm.tolist()
        last_ops, successes = signals.last_op.tolist(), signals.last_success.tolist()
        choices: list[Choice] = []
        for row, epoch in enumerate(epochs):
            entry = self._current(row)
            if entry and self._tried[row] and successes[row] and last_ops[row] == entry.op:
                self._next[row] += 1
                entry = self._current(row)
            self._tried[row] = False
            if entry and epoch >= entry.epoch:
                choices.append(self._try(entry, row, algorithms[row], masks))
            else:
                choices.append(WAIT)
        return pack_choices(choices, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return how far each row has come."""
        return {"next": list(self._next), "tried": list(self._tried)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._next = [int(index) for index in state["next"]]
        self._tried = [bool(tried) for tried in state["tried"]]

    def _current(self, row: int) -> Entry | None:
        """Return the entry whose turn it is, None after the last."""
        return self._entries[self._next[row]] if self._next[row] < len(self._entries) else None

    def _try(self, entry: Entry, row: int, algorithms: list[int], masks: Masks) -> Choice:
        choice = _complete(entry, algorithms)
        if is_legal(choice, masks, row):
            self._tried[row] = True
            return choice
        if entry.op is LifecycleOp.GERMINATE:
            self._warn_if_misfit(entry, masks, row)
        return WAIT

    def _warn_if_misfit(self, entry: Entry, masks: Masks, row: int) -> None:
        """Say so where only the blueprint is in the way: such an entry may wait for ever."""
        slot, blueprint = entry.choice["slot"], entry.choice["blueprint"]
        fits = masks.blueprint_by_slot[row, slot].tolist()
        if not bool(masks.slot_by_op[row, entry.op, slot]) or fits[blueprint]:
            return
        names = self._context.blueprint_names
        fitting = [name for name, fit in zip(names, fits, strict=False) if fit]
        warnings.warn(
            f"schedule entry {entry.number} waits: blueprint {names[blueprint]!r} does not fit "
            f"slot {self._context.slot_names[slot]!r} within the limits; "
            f"these do: {', '.join(fitting)}",
            EsperWarning,
            stacklevel=4,
        )


def _complete(entry: Entry, algorithms: list[int]) -> Choice:
    """Return the entry's choice with every head its op uses."""
    choice = {head: int(PLACEHOLDERS[head]) for head in CAUSAL_HEADS[entry.op]}
    if entry.op is LifecycleOp.SET_ALPHA_TARGET:
        algorithm = algorithms[entry.choice["slot"]]
        choice["style"] = _STYLE_OF_ALGORITHM.get(algorithm, choice["style"])
    return {**choice, **entry.choice}
