"""The history of one growing network, read back from its store as it was recorded."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from esper.leyline.records import (
    DEEPEN,
    DecisionRecord,
    DeepeningRecord,
    DepthRecord,
    EpochRecord,
    SlotRecord,
    StackRecord,
    copy_fields,
)
from esper.leyline.stages import SeedStage
from esper.nissa.columns import Row
from esper.nissa.limits import ANSWER_S
from esper.nissa.reader import StoredRun
from esper.nissa.schema import DecisionRow, EpochRow, StackRow, StageRow

T = TypeVar("T", SlotRecord, DecisionRecord, DeepeningRecord, StackRecord, EpochRecord)

_ABSENT = {float: math.nan, int: 0, bool: False, str: ""}
"""What a record that must have a value says where the store has none."""


def read_history(run: StoredRun, every: int = 1) -> list[EpochRecord]:
    """Return the history of a growing run as it was recorded.

    Args:
        run: where it was recorded.
        every: read one epoch in so many, and the last: a run of a million fits no page.
    """
    names = [str(name) for name in run.info.slots or ()]
    last = run.query("SELECT MAX(step) FROM epochs", timeout_s=ANSWER_S).rows[0][0]

    def read(table: str) -> Iterator[Row]:
        if every == 1:
            return run.records(table)
        return run.records(table, where="step % ? = 0 OR step = ?", parameters=[every, last])

    slots: dict[int, dict[str, SlotRecord]] = {}
    for stage in read("seed_stages"):
        assert isinstance(stage, StageRow)
        found = slots.setdefault(stage.step, {})
        found[str(stage.slot)] = _record(SlotRecord, stage, name=stage.slot)
    decisions: dict[int, DecisionRecord] = {}
    woken: dict[int, list[DeepeningRecord]] = {}
    for decision in read("decisions"):
        assert isinstance(decision, DecisionRow)
        # Blocks may wake more than once in an epoch; the first decision stands for all.
        decisions.setdefault(decision.step, _record(DecisionRecord, decision))
        if decision.op == DEEPEN:
            woken.setdefault(decision.step, []).append(
                _record(
                    DeepeningRecord,
                    decision,
                    stack=str(decision.slot),
                    before=decision.blocks_before or 0,
                    after=decision.blocks_after or 0,
                    step=decision.training_step or 0,
                )
            )
    stacks: dict[int, list[StackRecord]] = {}
    for stack in read("stacks"):
        assert isinstance(stack, StackRow)
        found_stack = _record(StackRecord, stack, name=str(stack.stack))
        stacks.setdefault(stack.step, []).append(found_stack)
    history = []
    for epoch in read("epochs"):
        assert isinstance(epoch, EpochRow)
        found = slots.get(epoch.step, {})
        history.append(
            _record(
                EpochRecord,
                epoch,
                epoch=epoch.step,
                slots=tuple(
                    found.get(name) or _empty_slot(name) for name in names or sorted(found)
                ),
                decision=decisions.get(epoch.step),
                rollback=epoch.rollback_reason,
                depth=_depth(epoch, stacks.get(epoch.step, ()), woken.get(epoch.step, ())),
            )
        )
    return history


def _depth(
    epoch: EpochRow, stacks: Sequence[StackRecord], woken: Sequence[DeepeningRecord]
) -> DepthRecord | None:
    """Return how deep a network was; None where the store has no stacks of it."""
    if not stacks:
        return None
    return DepthRecord(
        step=epoch.training_steps or 0,
        flops=epoch.training_flops or 0.0,
        static_flops=epoch.static_flops or 0.0,
        stacks=tuple(stacks),
        deepenings=tuple(woken),
    )


def _record(kind: type[T], row: Row, **given: Any) -> T:
    """Return the record that a row was made from."""
    for name, absent in _NEEDED[kind.__name__].items():
        if name not in given and getattr(row, name) is None:
            given[name] = absent
    return copy_fields(kind, row, **given)


def _needed(kind: type[Any]) -> dict[str, Any]:
    """Return what stands for an absent value, by the name of every field that must have one."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: _ABSENT[hints[name]] for name in names if hints[name] in _ABSENT}


_NEEDED = {kind.__name__: _needed(kind) for kind in T.__constraints__}


def _empty_slot(name: str) -> SlotRecord:
    empty = StageRow(stage=SeedStage.DORMANT.name, alpha=0.0, alpha_target=0.0)
    return _record(SlotRecord, empty, name=name)
