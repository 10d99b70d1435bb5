"""Schedules: their file format, and the controller that carries them out.

A schedule is a list of operations, each with the first epoch at which it may be done. Rows follow
one schedule or one each, so that a search can play hundreds of them side by side.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_VALUES, PLACEHOLDERS, LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError, instead, nearest, warn
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import NOOP
from esper.leyline.stages import MODULE_STAGES, STYLE_OF_ALGORITHM, SeedStage
from esper.tamiyo.controllers.registry import (
    WAIT,
    Choice,
    RowView,
    advance_seeds,
    check_rows,
    first_untried,
    pack_choices,
    read_rows,
    register_controller,
)
from esper.utils.settings import read_named

# ---- The format


GROW = "grow"
"""Germinate, then advance and fossilize the seed without further entries."""

OPS: dict[str, LifecycleOp] = {
    GROW: LifecycleOp.GERMINATE,
    **{op.name.lower(): op for op in LifecycleOp if op is not LifecycleOp.WAIT},
}
"""The value of `op` in an entry, and the operation that it begins with."""

_REQUIRED: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.GERMINATE: ("blueprint",),
    LifecycleOp.SET_ALPHA_TARGET: ("alpha_target",),
}
"""Fields an entry must have besides epoch, op and slot; other heads of its op are optional."""

PlainEntry: TypeAlias = Mapping[str, Any]
"""An entry as it stands in a file."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the epochs or the slots, such as 25%."""

    percent: float

    def of(self, whole: int) -> int:
        """Return this share of a whole, rounded; halves are rounded up."""
        return math.floor(self.percent / 100 * whole + 0.5)


ALL = "all"
"""The value of `slot` that means every slot of the host, the last one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation of a schedule, with names turned into indices."""

    number: int
    """Position in the schedule, from 1."""
    epoch: int | Share
    """First epoch at which it may be done."""
    op: LifecycleOp
    is_tended: bool
    """Whether the seed is advanced and fossilized without further entries."""
    slot: int | Share | None
    """None: every slot, one after another."""
    blueprints: tuple[int, ...]
    """Candidates to germinate: the first that fits is taken."""
    choice: Mapping[str, int]
    """Index by head for every other field that was given."""

    def first_epoch(self, horizon: int) -> int:
        """Return the first epoch in a run of this length; decisions begin after epoch 1."""
        return max(1, self.epoch.of(horizon)) if isinstance(self.epoch, Share) else self.epoch

    def slots_of(self, slots: int) -> tuple[int, ...]:
        """Return the indices of its slots on a host with `slots` slots, in the order of work."""
        if self.slot is None:
            return tuple(reversed(range(slots)))
        index = self.slot.of(slots - 1) if isinstance(self.slot, Share) else self.slot
        return (index,) if index < slots else ()


Schedule: TypeAlias = tuple[Entry, ...]
"""Entries in the order in which they are done; an empty schedule waits for ever."""


def load_schedule(path: str | Path, context: ControllerContext) -> Schedule:
    """Return the schedule in a JSON or YAML file."""
    document = read_named(path, "schedule")
    if not isinstance(document, list) or not document:
        raise UsageError(
            f"{path}: a schedule must be a list of entries such as "
            "{epoch: 20%, op: grow, slot: 0, blueprint: norm}, "
            f"got {_short(document)}"
        )
    return parse_schedule(document, context, where=str(path))


def parse_schedule(
    entries: Sequence[PlainEntry], context: ControllerContext, *, where: str = "schedule"
) -> Schedule:
    """Return entries with their names turned into the indices of this context."""
    return tuple(
        _entry(f"{where}: entry {number}", number, item, context)
        for number, item in enumerate(entries, start=1)
    )


def describe_schedule(entries: Sequence[PlainEntry]) -> str:
    """Return a schedule in one line."""
    return "; ".join(_describe(entry) for entry in entries) or "wait"


def _describe(entry: PlainEntry) -> str:
    blueprint = entry.get("blueprint", "")
    named = "/".join(blueprint) if isinstance(blueprint, list | tuple) else blueprint
    rest = [
        f"{key} {value}"
        for key, value in entry.items()
        if key not in ("epoch", "op", "slot", "blueprint")
    ]
    details = f" ({', '.join(rest)})" if rest else ""
    what = f"{str(entry['op']).lower()} {named}".rstrip()
    return f"{what} at {entry['slot']} from {entry['epoch']}{details}"


def _entry(where: str, number: int, item: Any, context: ControllerContext) -> Entry:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: must be a mapping of fields to values, got {_short(item)}")
    if "op" not in item:
        raise UsageError(f"{where}: field 'op' is missing; it is one of {', '.join(OPS)}")
    name = _name(where, "op", item["op"], list(OPS))
    op = OPS[name]
    required = ("epoch", "op", "slot", *_REQUIRED.get(op, ()))
    known = (*required, *(head for head in CAUSAL_HEADS[op] if head not in required))
    for key in item:
        if key not in known:
            raise UsageError(
                f"{where}: {name} takes no field {key!r}{instead(key, known, 'it takes')}"
            )
    for key in required:
        if key not in item:
            raise UsageError(f"{where}: field {key!r} is missing; {name} needs it")
    choices = [key for key in known if key in item and key in HEAD_VALUES and key != "op"]
    has_blueprint = "blueprint" in known
    return Entry(
        number=number,
        epoch=_epoch(where, item["epoch"]),
        op=op,
        is_tended=name == GROW,
        slot=_slot(where, item["slot"], context.slot_names),
        blueprints=_blueprints(where, item["blueprint"], context) if has_blueprint else (),
        choice={key: _choice(where, key, item[key]) for key in choices},
    )


def _epoch(where: str, value: Any) -> int | Share:
    share = _share(value)
    if share is not None:
        return share
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(
            f"{where}: field 'epoch' must be a whole number from 0 or a share of the horizon "
            f"such as 25%, got {_short(value)}"
        )
    return value


def _slot(where: str, value: Any, names: Sequence[str]) -> int | Share | None:
    """Return a slot, None for all.

    A number is an index, and text a name, because modules may be called '0'.
    """
    if value == ALL and ALL not in names:
        return None
    share = None if value in names else _share(value)
    if share is not None:
        return share
    if isinstance(value, str):
        return list(names).index(_name(where, "slot", value, names))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(names):
        raise UsageError(
            f"{where}: field 'slot' must be an index from 0 to {len(names) - 1}, a share such as "
            f"100%, {ALL!r}, or one of {', '.join(names)}, got {_short(value)}"
        )
    return value


def _share(value: Any) -> Share | None:
    """Return the share that a text such as '33%' means, None if it is no share."""
    if not isinstance(value, str) or not value.endswith("%"):
        return None
    try:
        percent = float(value.removesuffix("%"))
    except ValueError:
        return None
    return Share(percent) if 0.0 <= percent <= 100.0 else None


def _blueprints(where: str, value: Any, context: ControllerContext) -> tuple[int, ...]:
    names = context.blueprint_names
    known = [name for index, name in enumerate(names) if index != NOOP]
    chosen = value if isinstance(value, list | tuple) and value else [value]
    return tuple(names.index(_name(where, "blueprint", each, known)) for each in chosen)


def _choice(where: str, key: str, value: Any) -> int:
    """Return the index of a head's value: a name or a number."""
    allowed = HEAD_VALUES[key]
    if isinstance(allowed[0], str):
        names = [str(each).lower() for each in allowed]
        return names.index(_name(where, key, value, names))
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
        raise UsageError(
            f"{where}: field {key!r} must be one of {', '.join(map(str, allowed))}, "
            f"got {_short(value)}"
        )
    return allowed.index(value)


def _name(where: str, key: str, value: Any, known: Sequence[str]) -> str:
    """Return a known name, whatever its case, or raise with the nearest one."""
    if isinstance(value, str):
        if value in known:
            return value
        if value.lower() in known:
            return value.lower()
    raise UsageError(
        f"{where}: field {key!r} must be one of {', '.join(known)}, got {_short(value)}"
        f"{nearest(value.lower(), known) if isinstance(value, str) else ''}"
    )


def _short(value: Any) -> str:
    """Return a value as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(slots=True)
class _Progress:
    """The progress of one row."""

    next: int = 0
    """Index of the next entry."""
    place: int = 0
    """How many of its slots are done."""
    tended: list[int] = field(default_factory=list)
    """Slots whose seeds are advanced and fossilized without entries, in order."""
    tried: dict[str, int] | None = None
    """The last choice."""
    was_entry: bool = False
    """Whether that was the next entry."""


@register_controller("schedule")
class ScheduleController:
    """Carries out the entries of a schedule in order; rows do not wait for each other.

    While an entry is illegal, or its gate fails, it is tried again every epoch, and the entries
    after it wait. Seeds of `grow` entries are advanced and fossilized meanwhile. A `grow` that can
    never be done is skipped: its slot is missing or taken, or no blueprint fits within the limits.

    Args:
        schedules: one for all rows, or one for every row.
        context: the slots and blueprints that the indices refer to.
        is_quiet: whether warnings about entries that do not fit are left out.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        context: ControllerContext,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._schedules = tuple(schedules)
        self._context = context
        self._is_quiet = is_quiet
        self._warned: set[tuple[int, int]] = set()
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
        self._warned = set()
        self._rows = [_Progress() for _ in range(rows)]

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return each row's next operation if it is due and legal, else WAIT."""
        check_rows("schedule", len(self._rows), signals)
        rows = read_rows(signals, masks)
        return pack_choices([self._decide(index, row) for index, row in enumerate(rows)], masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of every row."""
        return {"rows": [asdict(progress) for progress in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the progress that `state_dict` returned."""
        self._rows = [_Progress(**copy.deepcopy(plain)) for plain in state["rows"]]

    def _decide(self, index: int, row: RowView) -> Choice:
        progress = self._rows[index]
        schedule = self._schedules[index if len(self._schedules) > 1 else 0]
        failed = self._note_outcome(progress, schedule, row)
        choices = advance_seeds(row, progress.tended)
        found = self._due(progress, schedule, row)
        due = None if found is None else self._legal_choice(*found, row)
        chosen = first_untried([*choices, *([] if due is None else [due])], failed)
        progress.tried = None if chosen is None else dict(chosen)
        progress.was_entry = chosen is not None and chosen is due
        return WAIT if chosen is None else chosen

    def _note_outcome(self, progress: _Progress, schedule: Schedule, row: RowView) -> Choice | None:
        """Move on to the next entry if the last one was done; return a choice that just failed."""
        tried = progress.tried
        if tried is None or row.last_op != tried["op"]:
            return None
        if not row.last_success:
            return tried
        if progress.was_entry and progress.next < len(schedule):
            if schedule[progress.next].is_tended:
                progress.tended.append(tried["slot"])
            progress.place += 1
        return None

    def _due(
        self, progress: _Progress, schedule: Schedule, row: RowView
    ) -> tuple[Entry, int] | None:
        """Return the next entry and its slot if it is due; skip what can never be done."""
        while progress.next < len(schedule):
            entry = schedule[progress.next]
            if row.epoch < entry.first_epoch(row.horizon):
                return None
            for slot in entry.slots_of(sum(row.enabled))[progress.place :]:
                if not (entry.is_tended and self._is_hopeless(entry, slot, row)):
                    return entry, slot
                progress.place += 1
            progress.next, progress.place = progress.next + 1, 0
        return None

    def _is_hopeless(self, entry: Entry, slot: int, row: RowView) -> bool:
        """Return whether a seed can never be germinated: its slot is taken, or nothing fits."""
        is_fossil = row.stage[slot] == SeedStage.FOSSILIZED
        if row.stage[slot] in MODULE_STAGES and (is_fossil or not row.copies[slot]):
            return True
        if any(row.fits[slot][blueprint] for blueprint in entry.blueprints):
            return False
        self._warn_once(entry, slot, row, "is passed over")
        return True

    def _legal_choice(self, entry: Entry, slot: int, row: RowView) -> Choice | None:
        """Return the choice of an entry if it is legal."""
        if not row.legal[entry.op][slot]:
            return None
        choice = carry_out(entry, slot, row)
        if choice is None:
            self._warn_once(entry, slot, row, "waits")
        return choice

    def _warn_once(self, entry: Entry, slot: int, row: RowView, what: str) -> None:
        """Warn, once per entry and slot, that no blueprint of the entry fits."""
        if self._is_quiet or (entry.number, slot) in self._warned:
            return
        self._warned.add((entry.number, slot))
        names = self._context.blueprint_names
        asked = " or ".join(repr(names[each]) for each in entry.blueprints)
        fitting = [name for name, fit in zip(names, row.fits[slot], strict=False) if fit]
        warn(
            f"schedule entry {entry.number} {what}: blueprint {asked} does not fit "
            f"slot {self._context.slot_names[slot]!r} within the limits; "
            f"these do: {', '.join(fitting) or 'none'}"
        )


def carry_out(entry: Entry, slot: int, row: RowView) -> Choice | None:
    """Return the choice of an entry, None if none of its blueprints fits."""
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
