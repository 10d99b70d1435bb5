"""Reads a schedule: a YAML or JSON list of operations, each with the epoch it may start at.

For example, in YAML:

    - {epoch: 8, op: germinate, slot: layer1, blueprint: norm, style: sigmoid_add, tempo: 5}
    - {epoch: 9, op: advance, slot: layer1}
    - {epoch: 30, op: set_alpha_target, slot: 0, alpha_target: 0.7, speed: 3, curve: cosine}
    - {epoch: 40, op: prune, slot: 0}

A slot is a name (text) or an index (a number); `REQUIRED` and `OPTIONAL` list each operation's
fields. Everything is checked at load, so that a schedule with a mistake never starts; each
refusal is one line with the file, the number of the entry (from 1), the field and what it may be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.actions import LifecycleOp
from esper.leyline.alpha import ALPHA_TARGETS, SPEED_TICKS, TEMPO_EPOCHS, AlphaCurve, BlendStyle
from esper.leyline.blueprints import NOOP
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError, nearest

OPS: dict[str, LifecycleOp] = {
    op.name.lower(): op for op in LifecycleOp if op is not LifecycleOp.WAIT
}
"""The operations a schedule can name."""

REQUIRED: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.GERMINATE: ("epoch", "op", "slot", "blueprint"),
    LifecycleOp.SET_ALPHA_TARGET: ("epoch", "op", "slot", "alpha_target"),
    LifecycleOp.PRUNE: ("epoch", "op", "slot"),
    LifecycleOp.FOSSILIZE: ("epoch", "op", "slot"),
    LifecycleOp.ADVANCE: ("epoch", "op", "slot"),
}
"""Fields an entry must have."""

OPTIONAL: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.GERMINATE: ("style", "tempo", "alpha_target"),
    LifecycleOp.SET_ALPHA_TARGET: ("style", "speed", "curve"),
    LifecycleOp.PRUNE: ("speed", "curve"),
    LifecycleOp.FOSSILIZE: (),
    LifecycleOp.ADVANCE: (),
}
"""Fields an entry may have; a style left out of set_alpha_target keeps the seed's algorithm."""

HEAD_OF_FIELD = {
    "slot": "slot",
    "blueprint": "blueprint",
    "style": "style",
    "tempo": "tempo",
    "alpha_target": "alpha_target",
    "speed": "alpha_speed",
    "curve": "alpha_curve",
}
"""The head of the action that each field decides."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of a schedule."""

    number: int
    """Position in the file, from 1."""
    epoch: int
    """Earliest epoch at which it may be done."""
    op: LifecycleOp
    """What to do."""
    choice: Mapping[str, int]
    """Index by head, 'op' included, for every field that was given."""


def load_schedule(path: str | Path, context: ControllerContext) -> tuple[Entry, ...]:
    """Return the entries of a schedule file, with names turned into indices."""
    document = _read(Path(path))
    if not isinstance(document, list) or not document:
        raise UsageError(
            f"{path}: a schedule must be a list of entries such as "
            "{epoch: 5, op: germinate, slot: 0, blueprint: norm}, "
            f"got {_short(document)}"
        )
    return tuple(
        _entry(f"{path}: entry {number}", number, item, context)
        for number, item in enumerate(document, start=1)
    )


def _read(path: Path) -> Any:
    """Return the plain data in a file; JSON by its ending, else YAML."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such schedule file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the schedule as text: {_line(error)}") from None
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
        raise UsageError(f"{path}: not valid {kind}: {_line(error)}") from None


def _entry(where: str, number: int, item: Any, context: ControllerContext) -> Entry:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: must be a mapping of fields to values, got {_short(item)}")
    if "op" not in item:
        raise UsageError(f"{where}: field 'op' is missing; it is one of {', '.join(OPS)}")
    op = OPS[_name(where, "op", item["op"], list(OPS))]
    known = (*REQUIRED[op], *OPTIONAL[op])
    for key in item:
        if key not in known:
            raise UsageError(
                f"{where}: {op.name.lower()} takes no field {key!r}"
                f"{nearest(str(key), known) or ';'} it takes {', '.join(known)}"
            )
    for key in REQUIRED[op]:
        if key not in item:
            raise UsageError(f"{where}: field {key!r} is missing; {op.name.lower()} needs it")
    epoch = item["epoch"]
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise UsageError(
            f"{where}: field 'epoch' must be a whole number from 0, got {_short(epoch)}"
        )
    choice = {"op": int(op)}
    for key in known:
        if key in item and key in HEAD_OF_FIELD:
            choice[HEAD_OF_FIELD[key]] = _FIELDS[key](where, item[key], context)
    return Entry(number=number, epoch=epoch, op=op, choice=choice)


def _slot(where: str, value: Any, context: ControllerContext) -> int:
    """A number is an index, text a name: some modules have names that look like numbers."""
    names = context.slot_names
    if isinstance(value, str):
        return names.index(_name(where, "slot", value, names))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(names):
        raise UsageError(
            f"{where}: field 'slot' must be an index from 0 to {len(names) - 1} or one of "
            f"{', '.join(names)}, got {_short(value)}"
        )
    return value


def _blueprint(where: str, value: Any, context: ControllerContext) -> int:
    names = context.blueprint_names
    known = [name for index, name in enumerate(names) if index != NOOP]
    return names.index(_name(where, "blueprint", value, known))


def _style(where: str, value: Any, context: ControllerContext) -> int:
    return BlendStyle[_name(where, "style", value, _names(BlendStyle)).upper()]


def _curve(where: str, value: Any, context: ControllerContext) -> int:
    return AlphaCurve[_name(where, "curve", value, _names(AlphaCurve)).upper()]


def _number(key: str, allowed: Sequence[float]) -> Callable[[str, Any, ControllerContext], int]:
    def index(where: str, value: Any, context: ControllerContext) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise UsageError(
                f"{where}: field {key!r} must be one of {', '.join(map(str, allowed))}, "
                f"got {_short(value)}"
            )
        return allowed.index(value)

    return index


_FIELDS: dict[str, Callable[[str, Any, ControllerContext], int]] = {
    "slot": _slot,
    "blueprint": _blueprint,
    "style": _style,
    "tempo": _number("tempo", TEMPO_EPOCHS),
    "alpha_target": _number("alpha_target", ALPHA_TARGETS),
    "speed": _number("speed", SPEED_TICKS),
    "curve": _curve,
}


def _names(kind: type[BlendStyle] | type[AlphaCurve]) -> list[str]:
    return [member.name.lower() for member in kind]


def _name(where: str, key: str, value: Any, known: Sequence[str]) -> str:
    """Return `value` if it is a known name, or raise with the nearest one."""
    if isinstance(value, str) and value in known:
        return value
    raise UsageError(
        f"{where}: field {key!r} must be one of {', '.join(known)}, got {_short(value)}"
        f"{nearest(value, known) if isinstance(value, str) else ''}"
    )


def _short(value: Any) -> str:
    """Return a value as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
