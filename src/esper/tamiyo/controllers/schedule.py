"""The controller that carries out schedules: the same operations, in the same order, every run.

It is the only place where schedules are carried out. Rows follow one schedule or one each, so that
a search plays hundreds of them side by side. What a schedule looks like: `schedule_format`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, PLACEHOLDERS, LifecycleOp
from esper.leyline.alpha import STYLE_OF_ALGORITHM
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError, warn
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import MODULE_STAGES
from esper.tamiyo.controllers.choices import WAIT, Choice, pack_choices
from esper.tamiyo.controllers.registry import register_controller
from esper.tamiyo.controllers.row_view import RowView, check_rows, read_rows
from esper.tamiyo.controllers.schedule_format import Entry, Schedule, load_schedule
from esper.tamiyo.controllers.tending import first_untried, tend


@dataclass(slots=True)
class _Progress:
    """How far one row has come."""

    next: int = 0
    """Index of the entry whose turn it is."""
    tended: list[int] = field(default_factory=list)
    """Slots whose seeds are brought up without being told, in order."""
    tried: dict[str, int] | None = None
    """What was chosen last."""
    was_entry: bool = False
    """Whether that was the entry whose turn it is."""


@register_controller("schedule")
class ScheduleController:
    """Carries out entries in order; every row goes at its own pace.

    An entry starts at its epoch at the earliest. While it is illegal, or when its gate fails, it
    waits and is tried again, and the entries after it wait too. What `grow` has germinated is
    advanced and fossilized meanwhile. A `grow` that can never be done, because its slot is missing
    or taken or because nothing it names fits within the limits, is passed over.

    Args:
        schedules: one for all rows, or one for every row.
        context: the slots and blueprints that their indices are of.
        is_quiet: whether it says nothing about entries that do not fit.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        context: ControllerContext,
        *,
        is_quiet: bool = False,
    ) -> None:
        """Take the schedules; `reset` says how many rows there are."""
        self._schedules = tuple(schedules)
        self._context = context
        self._is_quiet = is_quiet
        self._told: set[tuple[int, int]] = set()
        self._rows: list[_Progress] = []

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> ScheduleController:
        """Return the controller for the schedule in the file that `argument` names."""
        if not argument:
            raise UsageError("controller 'schedule' needs a file; write 'schedule:plan.yaml'")
        return cls([load_schedule(argument, context)], context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start the schedule again in every row."""
        if len(self._schedules) not in (1, rows):
            raise UsageError(
                f"{len(self._schedules)} schedules need as many rows, or one schedule all rows; "
                f"got {rows} rows"
            )
        self._told = set()
        self._rows = [_Progress() for _ in range(rows)]

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return each row's next operation where its time has come and it is legal, else WAIT."""
        check_rows("schedule", len(self._rows), signals)
        rows = read_rows(signals, masks)
        return pack_choices([self._decide(index, row) for index, row in enumerate(rows)], masks)

    def state_dict(self) -> dict[str, Any]:
        """Return how far each row has come."""
        return {"rows": [asdict(progress) for progress in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._rows = [_Progress(**copy.deepcopy(plain)) for plain in state["rows"]]

    def _decide(self, index: int, row: RowView) -> Choice:
        progress = self._rows[index]
        schedule = self._schedules[index if len(self._schedules) > 1 else 0]
        failed = self._note_outcome(progress, schedule, row)
        wishes = tend(row, progress.tended)
        entry = self._due(progress, schedule, row)
        due = None if entry is None else self._wish(entry, row)
        chosen = first_untried([*wishes, *([] if due is None else [due])], failed)
        progress.tried = None if chosen is None else dict(chosen)
        progress.was_entry = chosen is not None and chosen is due
        return WAIT if chosen is None else chosen

    def _note_outcome(self, progress: _Progress, schedule: Schedule, row: RowView) -> Choice | None:
        """Go on to the next entry where the last was done; return what has just failed."""
        tried = progress.tried
        if tried is None or row.last_op != tried["op"]:
            return None
        if not row.last_success:
            return tried
        if progress.was_entry and progress.next < len(schedule):
            if schedule[progress.next].is_tended:
                progress.tended.append(tried["slot"])
            progress.next += 1
        return None

    def _due(self, progress: _Progress, schedule: Schedule, row: RowView) -> Entry | None:
        """Return the entry whose turn and time it is; those that can never be done are passed."""
        while progress.next < len(schedule):
            entry = schedule[progress.next]
            if row.epoch < entry.first_epoch(row.horizon):
                return None
            slot = entry.slot_of(sum(row.enabled))
            if slot is not None and not (entry.is_tended and self._is_hopeless(entry, slot, row)):
                return entry
            progress.next += 1
        return None

    def _is_hopeless(self, entry: Entry, slot: int, row: RowView) -> bool:
        """Return whether a seed can never be germinated: its slot is taken, or nothing fits."""
        if row.stage[slot] in MODULE_STAGES:
            return True
        if any(row.fits[slot][blueprint] for blueprint in entry.blueprints):
            return False
        self._tell(entry, slot, row, "is passed over")
        return True

    def _wish(self, entry: Entry, row: RowView) -> Choice | None:
        """Return what the entry asks for, where it is legal."""
        slot = entry.slot_of(sum(row.enabled))
        if slot is None or not row.legal[entry.op][slot]:
            return None
        choice = carry_out(entry, slot, row)
        if choice is None:
            self._tell(entry, slot, row, "waits")
        return choice

    def _tell(self, entry: Entry, slot: int, row: RowView, what: str) -> None:
        """Say once where only the blueprint is in the way."""
        if self._is_quiet or (entry.number, slot) in self._told:
            return
        self._told.add((entry.number, slot))
        names = self._context.blueprint_names
        asked = " or ".join(repr(names[each]) for each in entry.blueprints)
        fitting = [name for name, fit in zip(names, row.fits[slot], strict=False) if fit]
        warn(
            f"schedule entry {entry.number} {what}: blueprint {asked} does not fit "
            f"slot {self._context.slot_names[slot]!r} within the limits; "
            f"these do: {', '.join(fitting) or 'none'}"
        )


def carry_out(entry: Entry, slot: int, row: RowView) -> Choice | None:
    """Return the choice that does what an entry asks for, None where no seed it names fits."""
    choice: dict[str, int] = {head: int(PLACEHOLDERS[head]) for head in CAUSAL_HEADS[entry.op]}
    choice |= {"op": int(entry.op), "slot": slot}
    if entry.op is LifecycleOp.SET_ALPHA_TARGET:
        choice["style"] = STYLE_OF_ALGORITHM.get(row.algorithm[slot], choice["style"])
    if entry.op is LifecycleOp.GERMINATE:
        fitting = [each for each in entry.blueprints if row.fits[slot][each]]
        if not fitting:
            return None
        choice["blueprint"] = fitting[0]
    return {**choice, **entry.choice}
