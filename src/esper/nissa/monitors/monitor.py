"""Monitors: the registry, the records they read, and the watch that runs them.

An alarm is raised when a finding appears or changes its severity, and cleared when it is gone; it
is not repeated in between. After a resume the active alarms are read from the store.
"""

from __future__ import annotations

import math
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from esper.leyline.records import copy_fields
from esper.leyline.registry import Registry
from esper.nissa.columns import Row
from esper.nissa.schema import AlarmRow, EpochRow, StageRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow
from esper.nissa.writer import read_records
from esper.utils.process import grouped

WINDOW = 256
"""Records of each kind that monitors can look back on."""


class Recent:
    """The last records of a run, newest last."""

    def __init__(self, run: RunRow | None = None) -> None:
        """Start with nothing."""
        self.run = run or RunRow()
        self.rounds: deque[RoundRow] = deque(maxlen=WINDOW)
        self.updates: deque[UpdateRow] = deque(maxlen=WINDOW)
        """The last optimisation epoch of each update."""
        self.heads: dict[str, deque[UpdateHeadRow]] = {}
        """Per head, its state at the end of each update."""
        self.epochs: deque[EpochRow] = deque(maxlen=WINDOW)
        self.episodes: deque[EpisodeRow] = deque(maxlen=WINDOW)
        self.stages: dict[str, StageRow] = {}
        """The occupied slots at the last epoch, by name."""
        self._stages_at = (-1, -1)

    @property
    def progress(self) -> float | None:
        """Share of the planned rounds that the newest update or round has reached."""
        if not self.run.rounds:
            return None
        newest = [rows[-1].round for rows in (self.rounds, self.updates) if rows]
        return (max(newest) + 1) / self.run.rounds if newest else None

    def add(self, record: Row) -> None:
        """Take in a record."""
        if isinstance(record, EpochRow):
            self.epochs.append(record)
        elif isinstance(record, StageRow):
            if self._stages_at != (record.round, record.step):
                self._stages_at = (record.round, record.step)
                self.stages.clear()
            self.stages[str(record.slot)] = record
        elif isinstance(record, UpdateHeadRow):
            rows = self.heads.setdefault(record.head, deque(maxlen=WINDOW))
            if rows and rows[-1].round == record.round:
                rows.pop()
            rows.append(record)
        elif isinstance(record, UpdateRow):
            if record.is_last:
                self.updates.append(record)
        elif isinstance(record, RoundRow):
            self.rounds.append(record)
        elif isinstance(record, EpisodeRow):
            self.episodes.append(record)


Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a monitor found."""

    severity: Severity
    message: str
    value: float | None = None
    """What was measured."""
    threshold: float | None = None
    """What it was compared with."""
    subject: str | None = None
    """The head, op, slot or blueprint it is about, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a number beyond which it is a finding, by severity."""

    info: float | None = None
    warning: float | None = None
    critical: float | None = None
    is_floor: bool = False
    """Whether values below the limits are findings, instead of those above."""

    def find(
        self, value: float | None, message: str, *, subject: str | None = None
    ) -> Finding | None:
        """Return the finding about a value, None if it is within the limits.

        Args:
            value: The value; None if it was not measured.
            message: The message, with placeholders `{value}` and `{limit}`.
            subject: What the value belongs to, where there are several.
        """
        sign = -1.0 if self.is_floor else 1.0
        severities: tuple[Severity, ...] = ("critical", "warning", "info")
        for severity in severities:
            limit = getattr(self, severity)
            if value is not None and limit is not None and sign * value > sign * limit:
                text = message.format(value=value, limit=limit)
                return Finding(severity, text, value, limit, subject)
        return None


R = TypeVar("R", bound=Row)


def find_lasting(
    rows: Iterable[R], count: int, check: Callable[[R], Iterable[Finding | None]]
) -> Iterator[Finding]:
    """Yield the findings about the newest row whose subject is found in each of the last rows."""
    last = list(rows)[-count:]
    if len(last) == count:
        found = [{one.subject: one for one in check(row) if one is not None} for row in last]
        for subject, newest in found[-1].items():
            if all(subject in earlier for earlier in found):
                yield newest


Check = Callable[[Recent], Iterable[Finding | None]]
"""Returns what it finds in the last records; None is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A check, with what it means and what to do about it."""

    name: str
    reads: type[Row]
    """The check runs after every record of this class."""
    thresholds: str
    """When it raises an alarm, in words."""
    meaning: str
    advice: str
    check: Check
    is_event: bool = False
    """Every finding is an alarm of its own, which is never cleared."""
    is_volatile: bool = False
    """It depends on the machine, so that identical runs may differ in it."""


MONITORS: Registry[Monitor] = Registry("monitor")
"""Monitors by name; add your own with `register_monitor`."""


def register_monitor(
    *,
    reads: type[Row],
    thresholds: str,
    advice: str,
    is_event: bool = False,
    is_volatile: bool = False,
) -> Callable[[Check], Check]:
    """Return a decorator that registers a check by its name; its docstring says what it means."""

    def register(check: Check) -> Check:
        name = check.__name__
        monitor = Monitor(
            name=name,
            reads=reads,
            thresholds=thresholds,
            meaning=(check.__doc__ or "").strip(),
            advice=advice,
            check=check,
            is_event=is_event,
            is_volatile=is_volatile,
        )
        MONITORS.register(name, monitor)
        return check

    return register


Series = Sequence[float | None]


def measured(values: Series) -> list[float]:
    """Return the finite values, in order."""
    return [value for value in values if value is not None and math.isfinite(value)]


def smoothed(values: Sequence[float], decay: float) -> float | None:
    """Return the exponential moving average, None without values."""
    average: float | None = None
    for value in values:
        average = value if average is None else decay * average + (1 - decay) * value
    return average


def is_latched(values: Series, *, enter: float, leave: float, consecutive: int) -> bool:
    """Return whether a series has fallen below `enter` and not recovered above `leave`.

    It falls with `consecutive` values in a row below `enter` and recovers with one above `leave`.
    Values that were not measured are skipped.
    """
    latched, below = False, 0
    for value in measured(values):
        if latched:
            latched = value <= leave
            below = 0
        else:
            below = below + 1 if value < enter else 0
            latched = below >= consecutive
    return latched


_Key = tuple[str, str | None]


class Watch:
    """Runs the monitors over the records of one run."""

    def __init__(self, run: RunRow | None = None) -> None:
        """Start without records and alarms."""
        self._recent = Recent(run)
        self._active: dict[_Key, str] = {}
        monitors = map(MONITORS.get, MONITORS.names())
        self._monitors = grouped((monitor.reads, monitor) for monitor in monitors)

    def observe(self, record: Row) -> list[AlarmRow]:
        """Take in a record and return the alarms it sets off."""
        self._recent.add(record)
        alarms: list[AlarmRow] = []
        if isinstance(record, UpdateRow) and not record.is_last:
            return alarms
        for monitor in self._monitors.get(type(record), ()):
            found = [each for each in monitor.check(self._recent) if each is not None]
            if monitor.is_event:
                alarms += [_alarm(monitor, finding, record) for finding in found]
            else:
                alarms += self._compare(monitor, found, record)
        return alarms

    def load(self, connection: sqlite3.Connection) -> None:
        """Read the records and the active alarms of a store."""
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
            text = f"{monitor.name}{f' ({key[1]})' if key[1] else ''} is over"
            quiet = Finding("info", text, subject=key[1])
            del self._active[key]
            alarms.append(_alarm(monitor, quiet, record, state="cleared"))
        return alarms


def _alarm(monitor: Monitor, finding: Finding, record: Row, *, state: str = "raised") -> AlarmRow:
    place = {
        name: getattr(record, name) for name in ("round", "row", "step") if hasattr(record, name)
    }
    return copy_fields(
        AlarmRow,
        finding,
        **place,
        volatile=monitor.is_volatile,
        monitor=monitor.name,
        state=state,
        advice=monitor.advice if state == "raised" else None,
    )


Light = Literal["good", "watch", "bad", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Thresholds of the colours of a metric."""

    watch: float
    bad: float
    meaning: str
    is_high_good: bool = False


BANDS: dict[str, Band] = {
    "explained_variance": Band(
        watch=0.3, bad=0.0, is_high_good=True, meaning="how much the critic explains"
    ),
    "clipfrac": Band(watch=0.25, bad=0.3, meaning="how many decisions were clipped"),
    "approx_kl": Band(watch=0.015, bad=0.03, meaning="how far an update moved the policy"),
    "grad_norm": Band(watch=5.0, bad=10.0, meaning="size of the learner's gradient"),
    "ratio_max": Band(watch=1.5, bad=2.0, meaning="greatest joint ratio"),
    "wait_share_free": Band(watch=1.0, bad=1.0, meaning="waiting where it could act; 99 % is fine"),
    "anti_gaming_share": Band(watch=0.05, bad=0.10, meaning="decisions penalised for gaming"),
    "growth_ratio": Band(watch=2.0, bad=5.0, meaning="parameters over those of the host"),
    "obs_clamp_share": Band(watch=0.05, bad=0.10, meaning="observation entries at their clamp"),
    "feedback_dependence": Band(
        watch=0.3, bad=0.6, meaning="op probability that hangs on the last action alone"
    ),
    "stale_s": Band(watch=2.0, bad=5.0, meaning="seconds since the last record of a running run"),
}
"""By metric; a metric without a band has no colour."""


def light(metric: str, value: float | None) -> Light:
    """Return the colour of a metric; unknown if it was not measured or has no band."""
    band = BANDS.get(metric)
    if band is None or value is None or math.isnan(value):
        return "unknown"
    if band.is_high_good:
        if value >= band.watch:
            return "good"
        return "watch" if value >= band.bad else "bad"
    if value >= band.bad:
        return "bad"
    return "watch" if value >= band.watch else "good"
