"""The alarms of a run as a table: what was wrong, what it means, what to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from esper.nissa.monitors import MONITORS
from esper.nissa.schema import AlarmRow
from esper.report.tables import NOTHING, Column, render_table
from esper.report.text import format_count

_ORDER = {"critical": 0, "warning": 1, "info": 2}
_MOST_TOLD = 4


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
        Column("When", "when"),
        Column("What", "words"),
        Column("It means", "words"),
        Column("What to try", "words"),
    )
    rows = [
        (
            members[0].first.severity or NOTHING,
            _when(members),
            _what(members),
            _meaning(members[0].first.monitor),
            members[0].first.advice or NOTHING,
        )
        for members in _by_monitor(groups)
    ]
    return render_table("Alarms, the gravest first", columns, rows, noun="alarm")


def _by_monitor(groups: list[AlarmGroup]) -> list[list[AlarmGroup]]:
    """Return what one monitor found about several subjects together, where it is as grave."""
    found: dict[tuple[str | None, str | None, str | None], list[AlarmGroup]] = {}
    for group in groups:
        first = group.first
        found.setdefault((first.monitor, first.severity, first.advice), []).append(group)
    return list(found.values())


def _what(members: list[AlarmGroup]) -> str:
    told = [group.first.message or group.first.monitor or NOTHING for group in members]
    beyond = len(told) - _MOST_TOLD
    more = f"; and {beyond} more" if beyond > 0 else ""
    return "; ".join(told[:_MOST_TOLD]) + more


def _moment(alarm: AlarmRow) -> int:
    return alarm.round or alarm.step


def _when(members: list[AlarmGroup]) -> str:
    is_round = any(group.first.round or not group.first.step for group in members)
    unit = "round" if is_round else "epoch"
    first = min(_moment(group.first) for group in members)
    last = max(group.last for group in members)
    when = f"{unit} {format_count(first)}"
    if last != first:
        when += f" to {format_count(last)}"
    count = sum(group.count for group in members)
    if count > 1:
        when += f", {format_count(count)} times"
    return f"{when}, then over" if all(group.is_over for group in members) else when


def _meaning(monitor: str | None) -> str:
    return MONITORS.get(monitor).meaning if monitor is not None and monitor in MONITORS else NOTHING
