"""What a schedule would do now, whoever has acted so far.

A controller that carries out a schedule knows what it has done itself. Where a pupil acts, that is
worth nothing: it may have planted something else, somewhere else, or nothing at all. The teacher
reads from the slots what is there. Seeds that its schedule asks for are brought up, other ones are
pruned, and what is missing is germinated when its time has come.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, MODULE_STAGES
from esper.tamiyo.controllers.choices import WAIT, Choice, pack_choices
from esper.tamiyo.controllers.row_view import RowView, read_rows
from esper.tamiyo.controllers.schedule import carry_out
from esper.tamiyo.controllers.schedule_format import Entry, Schedule
from esper.tamiyo.controllers.tending import tend


class ScheduleTeacher:
    """Says what every row's schedule would do next.

    Args:
        schedules: one for every row, of `grow` entries alone: what a search finds.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        """Take the schedules; nothing is remembered from one decision to the next."""
        assert all(entry.is_tended for schedule in schedules for entry in schedule)
        self._schedules = tuple(schedules)

    def advise(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return what each row should do."""
        rows = read_rows(signals, masks)
        return pack_choices(list(map(advise_row, rows, self._schedules)), masks)


def advise_row(row: RowView, schedule: Schedule) -> Choice:
    """Return what one row should do."""
    planned: dict[int, Entry] = {}
    for entry in schedule:
        slot = entry.slot_of(sum(row.enabled))
        if slot is not None:
            planned.setdefault(slot, entry)
    live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
    wanted = [s for s in live if s in planned and row.blueprint[s] in planned[s].blueprints]
    prune = LifecycleOp.PRUNE
    wishes = tend(row, wanted)
    wishes += [
        {"op": int(prune), "slot": slot}
        for slot in live
        if slot not in wanted and row.legal[prune][slot]
    ]
    for slot, entry in planned.items():
        is_missing = row.stage[slot] not in MODULE_STAGES and row.legal[entry.op][slot]
        if is_missing and row.epoch >= entry.first_epoch(row.horizon):
            choice = carry_out(entry, slot, row)
            wishes += [] if choice is None else [choice]
    # What a gate has just refused does not keep other seeds of the row waiting.
    failed = None if row.last_success else row.last_op
    return min(wishes, key=lambda wish: wish["op"] == failed, default=WAIT)
