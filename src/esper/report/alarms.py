"""The alarms of a run as a table: what was wrong, what it means, what to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from esper.nissa.monitors import MONITORS
from esper.nissa.schema import AlarmRow
from esper.report.tables import NOTHING, Column, render_table
from esper.report.text import format_count

_ORDER = {"critical": 0, "warning": 1, "info": 2}


@dataclass(slots=True)
class AlarmGroup:
    """Alarms of one monitor about one subject, with one severity."""

    first: AlarmRow
    count: int = 0
    last: int = 0
    """Round of the last one in training, else its epoch."""
    is_over: bool = False


def group_alarms(alarms: Iterable[AlarmRow]) -> list[AlarmGroup]:
    """Return what was raised, the gravest first; what was raised often is one entry."""
    groups: dict[tuple[str | None, str | None, str | None], AlarmGroup] = {}
    active: dict[tuple[str | None, str | None], AlarmGroup] = {}
    for alarm in alarms:
        subject = (alarm.monitor, alarm.subject)
        before = active.get(subject)
        if before is not None:
            before.is_over = True
        if alarm.state != "raised":
            continue
        group = groups.setdefault((*subject, alarm.severity), AlarmGroup(alarm))
        group.count += 1
        group.last = _moment(alarm)
        group.is_over = False
        active[subject] = group
    return sorted(
        groups.values(),
        key=lambda group: (_ORDER.get(str(group.first.severity), 3), _moment(group.first)),
    )


def render_alarms(groups: list[AlarmGroup]) -> str:
    """Return the table of all alarms."""
    columns = (
        Column("Severity"),
        Column("When", "number"),
        Column("What", "words"),
        Column("It means", "words"),
        Column("What to try", "words"),
    )
    rows = [
        (
            group.first.severity or NOTHING,
            _when(group),
            group.first.message or group.first.monitor or NOTHING,
            _meaning(group.first.monitor),
            group.first.advice or NOTHING,
        )
        for group in groups
    ]
    return render_table("Alarms, the gravest first", columns, rows, noun="alarm")


def _moment(alarm: AlarmRow) -> int:
    return alarm.round or alarm.step


def _when(group: AlarmGroup) -> str:
    unit = "round" if group.first.round else "epoch"
    first = _moment(group.first)
    when = f"{unit} {format_count(first)}"
    if group.last != first:
        when += f" to {format_count(group.last)}"
    if group.count > 1:
        when += f", {format_count(group.count)} times"
    return f"{when}, then over" if group.is_over else when


def _meaning(monitor: str | None) -> str:
    return MONITORS.get(monitor).meaning if monitor is not None and monitor in MONITORS else NOTHING
