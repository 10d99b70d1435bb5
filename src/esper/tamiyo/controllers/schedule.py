"""The controller that carries out a schedule: the same operations, in the same order, every run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_VALUES, PLACEHOLDERS, LifecycleOp
from esper.leyline.alpha import AlphaAlgorithm, BlendStyle
from esper.leyline.blueprints import NOOP
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EsperWarning, UsageError, nearest
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.choices import WAIT, Choice, is_legal, pack_choices
from esper.tamiyo.controllers.registry import register_controller

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


_Read = Callable[[str, Any, ControllerContext], int]


def _named(key: str, head: str) -> _Read:
    names = [str(value).lower() for value in HEAD_VALUES[head]]
    return lambda where, value, context: names.index(_name(where, key, value, names))


def _number(key: str, head: str) -> _Read:
    allowed = HEAD_VALUES[head]

    def index(where: str, value: Any, context: ControllerContext) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise UsageError(
                f"{where}: field {key!r} must be one of {', '.join(map(str, allowed))}, "
                f"got {_short(value)}"
            )
        return allowed.index(value)

    return index


_FIELDS: dict[str, _Read] = {
    "slot": _slot,
    "blueprint": _blueprint,
    "style": _named("style", "style"),
    "tempo": _number("tempo", "tempo"),
    "alpha_target": _number("alpha_target", "alpha_target"),
    "speed": _number("speed", "alpha_speed"),
    "curve": _named("curve", "alpha_curve"),
}


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
