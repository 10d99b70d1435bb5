"""The format of schedules: a list of operations, each with the epoch from which it may be done.

    - {epoch: 0%, op: grow, slot: 100%, blueprint: conv_heavy, tempo: 3}
    - {epoch: 33%, op: grow, slot: r0c0, blueprint: [attention, norm], style: GATED_GATE}
    - {epoch: 40, op: prune, slot: r0c0, alpha_speed: 5}

Names are those that logs and reports print, in either case. An epoch is a number or a share of the
horizon, a slot its name, its index or a share of the way from the first (0%) to the last (100%), so
that one schedule serves hosts of any depth and runs of any length. Of several blueprints the first
that fits the slot within the limits is taken. `grow` germinates and then brings the seed up by
itself: it advances as soon as its gates open, and fossilizes. docs/proof.md has the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from esper.leyline.actions import HEAD_VALUES, LifecycleOp
from esper.leyline.blueprints import NOOP
from esper.leyline.controller import ControllerContext
from esper.leyline.documents import read_named
from esper.leyline.errors import UsageError, instead, nearest

GROW = "grow"
"""Germinate, and bring the seed up without being told."""

OPS: dict[str, LifecycleOp] = {
    GROW: LifecycleOp.GERMINATE,
    **{op.name.lower(): op for op in LifecycleOp if op is not LifecycleOp.WAIT},
}
"""What an entry can name, and the operation it begins with."""

_ALWAYS = ("epoch", "op", "slot")
REQUIRED: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.GERMINATE: (*_ALWAYS, "blueprint"),
    LifecycleOp.SET_ALPHA_TARGET: (*_ALWAYS, "alpha_target"),
    LifecycleOp.PRUNE: _ALWAYS,
    LifecycleOp.FOSSILIZE: _ALWAYS,
    LifecycleOp.ADVANCE: _ALWAYS,
}
"""Fields an entry must have."""

OPTIONAL: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.GERMINATE: ("style", "tempo", "alpha_target"),
    LifecycleOp.SET_ALPHA_TARGET: ("style", "alpha_speed", "alpha_curve"),
    LifecycleOp.PRUNE: ("alpha_speed", "alpha_curve"),
    LifecycleOp.FOSSILIZE: (),
    LifecycleOp.ADVANCE: (),
}
"""Fields an entry may have; a style left out of set_alpha_target keeps the seed's algorithm."""

PlainEntry: TypeAlias = Mapping[str, Any]
"""An entry as it stands in a file."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of something that is only known where the schedule is carried out."""

    percent: float

    def of(self, whole: int) -> int:
        """Return this share of a whole, rounded to the nearest number, halves up."""
        return math.floor(self.percent / 100 * whole + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation of a schedule, with names turned into indices."""

    number: int
    """Position in the schedule, from 1."""
    epoch: int | Share
    """Earliest epoch at which it may be done."""
    op: LifecycleOp
    """What to do."""
    is_tended: bool
    """Whether the seed is brought up without being told."""
    slot: int | Share
    """Where."""
    blueprints: tuple[int, ...]
    """What to germinate: the first that fits."""
    choice: Mapping[str, int]
    """Index by head for every other field that was given."""

    def first_epoch(self, horizon: int) -> int:
        """Return the earliest epoch in a run of this length; decisions begin after the first."""
        return max(1, self.epoch.of(horizon)) if isinstance(self.epoch, Share) else self.epoch

    def slot_of(self, slots: int) -> int | None:
        """Return the index of the slot on a host with so many of them, None where it is missing."""
        index = self.slot.of(slots - 1) if isinstance(self.slot, Share) else self.slot
        return index if index < slots else None


Schedule: TypeAlias = tuple[Entry, ...]
"""Entries in the order in which they are done; none of them is to wait for ever."""


def load_schedule(path: str | Path, context: ControllerContext) -> Schedule:
    """Return the schedule in a file: JSON by its ending, else YAML."""
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
    """Return a schedule as people say it, in one line."""
    return "; ".join(_describe(entry) for entry in entries) or "wait"


def _describe(entry: PlainEntry) -> str:
    blueprint = entry.get("blueprint", "")
    named = "/".join(blueprint) if isinstance(blueprint, list | tuple) else blueprint
    rest = [
        f"{key} {value}"
        for key, value in entry.items()
        if key not in ("epoch", "op", "slot", "blueprint")
    ]
    told = f" ({', '.join(rest)})" if rest else ""
    what = f"{str(entry['op']).lower()} {named}".rstrip()
    return f"{what} at {entry['slot']} from {entry['epoch']}{told}"


def _entry(where: str, number: int, item: Any, context: ControllerContext) -> Entry:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: must be a mapping of fields to values, got {_short(item)}")
    if "op" not in item:
        raise UsageError(f"{where}: field 'op' is missing; it is one of {', '.join(OPS)}")
    name = _name(where, "op", item["op"], list(OPS))
    op = OPS[name]
    known = (*REQUIRED[op], *OPTIONAL[op])
    for key in item:
        if key not in known:
            told = instead(key, known, "it takes")
            raise UsageError(f"{where}: {name} takes no field {key!r}{told}")
    for key in REQUIRED[op]:
        if key not in item:
            raise UsageError(f"{where}: field {key!r} is missing; {name} needs it")
    return Entry(
        number=number,
        epoch=_epoch(where, item["epoch"]),
        op=op,
        is_tended=name == GROW,
        slot=_slot(where, item["slot"], context.slot_names),
        blueprints=_blueprints(where, item.get("blueprint"), context)
        if "blueprint" in known
        else (),
        choice={
            key: _VALUES[key](where, item[key]) for key in known if key in _VALUES and key in item
        },
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


def _slot(where: str, value: Any, names: Sequence[str]) -> int | Share:
    """A number is an index, text a name: some modules have names that look like numbers."""
    if isinstance(value, str) and value not in names and _share(value) is not None:
        return _share(value) or Share(0.0)
    if isinstance(value, str):
        return list(names).index(_name(where, "slot", value, names))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(names):
        raise UsageError(
            f"{where}: field 'slot' must be an index from 0 to {len(names) - 1}, a share such as "
            f"100%, or one of {', '.join(names)}, got {_short(value)}"
        )
    return value


def _share(value: Any) -> Share | None:
    """Return the share that a text such as '33%' means, None where it means none."""
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


_Read = Callable[[str, Any], int]


def _named(key: str) -> _Read:
    names = [str(value).lower() for value in HEAD_VALUES[key]]
    return lambda where, value: names.index(_name(where, key, value, names))


def _number(key: str) -> _Read:
    allowed = HEAD_VALUES[key]

    def index(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise UsageError(
                f"{where}: field {key!r} must be one of {', '.join(map(str, allowed))}, "
                f"got {_short(value)}"
            )
        return allowed.index(value)

    return index


_VALUES: dict[str, _Read] = {
    "style": _named("style"),
    "tempo": _number("tempo"),
    "alpha_target": _number("alpha_target"),
    "alpha_speed": _number("alpha_speed"),
    "alpha_curve": _named("alpha_curve"),
}


def _name(where: str, key: str, value: Any, known: Sequence[str]) -> str:
    """Return the known name that `value` is, in either case, or raise with the nearest one."""
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
