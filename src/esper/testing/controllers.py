"""The conformance battery of controllers: what every controller must hold, whatever it decides."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import EsperWarning
from esper.leyline.randomness import generator
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import make_controller
from esper.testing._comparing import require as _require
from esper.testing._comparing import same as _same
from esper.testing.signals import random_signals

ControllerFactory: TypeAlias = Callable[[ControllerContext], Controller]
Step: TypeAlias = tuple[Signals, Masks]
Actions: TypeAlias = dict[str, Tensor]


def check_controller(
    controller: str | ControllerFactory,
    *,
    rows: Sequence[int] = (1, 3),
    slots: int = 3,
    steps: int = 40,
    seed: int = 0,
) -> None:
    """Run a controller over random situations and raise where it breaks the protocol.

    Checked are: the protocol's methods; actions with every head as int64 [rows] that the masks
    allow and with placeholders in the heads their op does not use; signals and masks left as they
    were; a memory of plain data and tensors that, loaded into a fresh controller in the middle of
    a run, gives the same actions from then on; and `reset`, after which everything repeats.

    Args:
        controller: Its name, as in 'every_nth:4', or what returns a new one for a context each time
            it is called. Its slots are called r0c0, r0c1 and so on, its blueprints are the built-in
            ones.
        rows: Numbers of rows to try.
        slots: Number of slots.
        steps: Decisions per run.
        seed: Names the random situations.

    Raises:
        AssertionError: The controller breaks the protocol; the message says where.
    """
    if isinstance(controller, str):
        factory: ControllerFactory = partial(make_controller, controller)
    else:
        factory = controller
    context = ControllerContext(slot_names=tuple(f"r0c{slot}" for slot in range(slots)), seed=seed)
    made = factory(context)
    _require(
        isinstance(made, Controller) and not isinstance(made, type),
        f"{made!r} must be an object with reset, act, state_dict and load_state_dict",
    )
    with warnings.catch_warnings():
        # Random situations are often ones a controller rightly warns about.
        warnings.simplefilter("ignore", EsperWarning)
        for count in rows:
            stream = generator(seed, count, slots, "check_controller")
            situations = [random_signals(count, slots, stream) for _ in range(steps)]
            _check_run(factory, context, situations, count)


def _check_run(
    factory: ControllerFactory, context: ControllerContext, situations: Sequence[Step], rows: int
) -> None:
    middle = len(situations) // 2
    controller = factory(context)
    controller.reset(rows, "cpu")
    run: list[Step] = []
    taken: list[Actions] = []
    state: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for index, (signals, masks) in enumerate(situations):
        if index == middle:
            state = controller.state_dict()
            check_plain(state)
            saved = copy.deepcopy(state)
        # What a controller is told about its last action is what it really did.
        last_op = taken[-1]["op"] if taken else torch.zeros_like(signals.last_op)
        run.append((replace(signals, last_op=last_op), masks))
        taken.append(_checked_act(controller, run[-1], index))
    _require(
        _same(state, saved), "state_dict() changed while the controller went on; return copies"
    )

    restored = factory(context)
    restored.reset(rows, "cpu")
    restored.load_state_dict(copy.deepcopy(saved))
    _require(
        _same(restored.state_dict(), saved),
        f"{rows} rows: state_dict() after load_state_dict(state) is not the state",
    )
    later = taken[middle:]
    _require_repeat(restored, run[middle:], later, f"{rows} rows: after load_state_dict")
    controller.load_state_dict(copy.deepcopy(saved))
    _require_repeat(controller, run[middle:], later, f"{rows} rows: after going back to a state")
    controller.reset(rows, "cpu")
    _require_repeat(controller, run, taken, f"{rows} rows: after reset")


def _require_repeat(
    controller: Controller, run: Sequence[Step], expected: Sequence[Actions], when: str
) -> None:
    for index, (step, before) in enumerate(zip(run, expected, strict=True)):
        again = controller.act(*step)
        _require(_same(again, before), f"{when}, step {index} gave other actions than before")


def _checked_act(controller: Controller, step: Step, index: int) -> Actions:
    """Return the actions of one step after checking them."""
    before = _tensors(step)
    actions = controller.act(*step)
    for name, values in _tensors(step).items():
        _require(_same(values, before[name]), f"step {index}: act() changed {name}")
    try:
        check_actions(actions, step[1])
    except AssertionError as error:
        raise AssertionError(f"step {index}: {error}") from None
    return {head: values.clone() for head, values in actions.items()}


def _tensors(step: Step) -> dict[str, Tensor]:
    """Return a copy of every tensor a controller is shown, by name."""
    return {
        f"{type(shown).__name__}.{name}": values.clone()
        for shown in step
        for name, values in shown.state_dict().items()
    }


def check_actions(actions: Mapping[str, Tensor], masks: Masks) -> None:
    """Raise AssertionError unless every row's action is complete, legal and canonical."""
    _require(
        set(actions) == set(HEAD_NAMES),
        f"actions must have the heads {', '.join(HEAD_NAMES)}, got {', '.join(actions)}",
    )
    for head, values in actions.items():
        _require(
            values.dtype == torch.int64 and tuple(values.shape) == (masks.rows,),
            f"head {head!r} must be int64 [{masks.rows}], got {values.dtype} {list(values.shape)}",
        )
    for row in range(masks.rows):
        _check_row(row, {head: int(values[row]) for head, values in actions.items()}, masks)


def _check_row(row: int, action: dict[str, int], masks: Masks) -> None:
    where = f"row {row}"
    _require(_allowed(masks.op[row], action["op"]), f"{where}: op {action['op']} is not legal")
    op = LifecycleOp(action["op"])
    slots = masks.slot_by_op[row, op]
    _require(_allowed(slots, action["slot"]), f"{where}: {op.name} at an illegal slot: {action}")
    for head in HEAD_NAMES:
        if head == "op":
            continue
        if head not in CAUSAL_HEADS[op]:
            wanted = int(slots.nonzero()[0]) if head == "slot" else int(PLACEHOLDERS[head])
            _require(
                action[head] == wanted,
                f"{where}: {op.name} does not use {head!r}, which must be {wanted}: {action}",
            )
        elif head != "slot":
            by_slot = masks.blueprint_by_slot[row, action["slot"]]
            mask = by_slot if head == "blueprint" else getattr(masks, head)[row]
            _require(_allowed(mask, action[head]), f"{where}: {head!r} is not legal: {action}")


def check_plain(value: Any, where: str = "state_dict()") -> None:
    """Raise AssertionError unless a state is made of plain data and tensors only."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require(isinstance(key, str), f"{where} has the key {key!r}; keys must be text")
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    else:
        plain = value is None or type(value) in (bool, int, float, str)
        _require(
            plain or isinstance(value, Tensor),
            f"{where} is a {type(value).__name__}; use numbers, text, lists, dicts and tensors",
        )


def _allowed(mask: Tensor, index: int) -> bool:
    return 0 <= index < len(mask) and bool(mask[index])
