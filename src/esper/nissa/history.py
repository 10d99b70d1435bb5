"""The history of one growing network, read back from its store as it was recorded."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, TypeVar

from esper.leyline.records import DecisionRecord, EpochRecord, SlotRecord, copy_fields
from esper.leyline.stages import SeedStage
from esper.nissa.columns import Row
from esper.nissa.reader import StoredRun
from esper.nissa.schema import DecisionRow, EpochRow, StageRow

T = TypeVar("T", SlotRecord, DecisionRecord, EpochRecord)

_ABSENT = {float: math.nan, int: 0, bool: False, str: ""}
"""What a record that must have a value says where the store has none."""


def read_history(run: StoredRun) -> list[EpochRecord]:
    """Return the history of a growing run as it was recorded."""
    names = [str(name) for name in run.info.slots or ()]
    slots: dict[int, dict[str, SlotRecord]] = {}
    for stage in run.records("seed_stages"):
        assert isinstance(stage, StageRow)
        found = slots.setdefault(stage.step, {})
        found[str(stage.slot)] = _record(SlotRecord, stage, name=stage.slot)
    decisions = {}
    for decision in run.records("decisions"):
        assert isinstance(decision, DecisionRow)
        decisions[decision.step] = _record(DecisionRecord, decision)
    history = []
    for epoch in run.records("epochs"):
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
            )
        )
    return history


def _record(kind: type[T], row: Row, **given: Any) -> T:
    """Return the record that a row was made from."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        absent = _ABSENT.get(hints[field.name])
        if absent is not None and field.name not in given and getattr(row, field.name) is None:
            given[field.name] = absent
    return copy_fields(kind, row, **given)


def _empty_slot(name: str) -> SlotRecord:
    return SlotRecord(
        name=name,
        stage=SeedStage.DORMANT.name,
        blueprint=None,
        alpha=0.0,
        alpha_target=0.0,
        parameters=0,
        flops=0,
        epochs_in_stage=0,
        age=0,
        contribution=None,
        contribution_se=None,
    )
