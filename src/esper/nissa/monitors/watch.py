"""Watch: runs the monitors over records as they pass and turns findings into alarms.

An alarm is raised when a finding appears or changes its severity, and cleared when it is gone;
it is not repeated meanwhile. After a resume, what is active is read from the store.
"""

from __future__ import annotations

import sqlite3

from esper.nissa.columns import Row
from esper.nissa.inserts import read_records
from esper.nissa.monitors.table import MONITORS, WINDOW, Finding, Monitor, Recent
from esper.nissa.schema import AlarmRow, RunRow, UpdateRow

_Key = tuple[str, str | None]


class Watch:
    """Looks at every record of one run."""

    def __init__(self, run: RunRow | None = None) -> None:
        """Start with nothing recorded and all quiet."""
        self._recent = Recent(run)
        self._active: dict[_Key, str] = {}
        self._monitors: dict[type[Row], list[Monitor]] = {}
        for name in MONITORS.names():
            monitor = MONITORS.get(name)
            self._monitors.setdefault(monitor.reads, []).append(monitor)

    def observe(self, record: Row) -> list[AlarmRow]:
        """Take in a record and return the alarms it sets off."""
        self._recent.add(record)
        alarms: list[AlarmRow] = []
        if isinstance(record, UpdateRow) and not record.is_last:
            return alarms
        for monitor in self._monitors.get(type(record), ()):
            found = list(monitor.check(self._recent))
            if monitor.is_event:
                alarms += [_alarm(monitor, finding, record) for finding in found]
            else:
                alarms += self._compare(monitor, found, record)
        return alarms

    def load(self, connection: sqlite3.Connection) -> None:
        """Take in what a store holds already, without alarms."""
        for table in ("rounds", "updates", "update_heads", "episodes"):
            condition = f'WHERE round > (SELECT MAX(round) FROM "{table}") - {WINDOW}'
            for record in read_records(connection, table, condition):
                self._recent.add(record)
        last = f"WHERE id > (SELECT MAX(id) FROM epochs) - {WINDOW}"
        for record in read_records(connection, "epochs", last):
            self._recent.add(record)
        for alarm in read_records(connection, "alarms", "WHERE volatile = 0"):
            assert isinstance(alarm, AlarmRow)
            key = (str(alarm.monitor), alarm.subject)
            if alarm.state == "cleared":
                self._active.pop(key, None)
            elif str(alarm.monitor) in MONITORS and not MONITORS.get(str(alarm.monitor)).is_event:
                self._active[key] = str(alarm.severity)

    def _compare(self, monitor: Monitor, found: list[Finding], record: Row) -> list[AlarmRow]:
        alarms = []
        now = {finding.subject: finding for finding in found}
        for subject, finding in now.items():
            key = (monitor.name, subject)
            if self._active.get(key) != finding.severity:
                self._active[key] = finding.severity
                alarms.append(_alarm(monitor, finding, record))
        gone = [key for key in self._active if key[0] == monitor.name and key[1] not in now]
        for key in gone:
            quiet = Finding(
                severity="info",
                subject=key[1],
                message=f"{monitor.name}{f' ({key[1]})' if key[1] else ''} is over",
            )
            del self._active[key]
            alarms.append(_alarm(monitor, quiet, record, state="cleared"))
        return alarms


def _alarm(monitor: Monitor, finding: Finding, record: Row, *, state: str = "raised") -> AlarmRow:
    place = {
        name: getattr(record, name)
        for name in ("round", "row", "step")
        if name in type(record).__dataclass_fields__
    }
    return AlarmRow(
        **place,
        volatile=monitor.is_volatile,
        monitor=monitor.name,
        severity=finding.severity,
        state=state,
        subject=finding.subject,
        value=finding.value,
        threshold=finding.threshold,
        message=finding.message,
        advice=monitor.advice if state == "raised" else None,
    )
