"""Where a run came from and what was found in it: alarms, command, versions, settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from esper.leyline.grouping import grouped
from esper.leyline.records import RunSummary, told_round
from esper.nissa.monitors import MONITORS
from esper.nissa.schema import AlarmRow
from esper.report.markup import counted, escaped, format_count, format_duration
from esper.report.page import (
    NOTHING,
    Column,
    flatten,
    render_pairs,
    render_table,
    section,
    word_columns,
)

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
    words = word_columns("What", "It means", "What to try")
    columns = (Column("Severity"), Column("When", "when"), *words)
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
    kinds = attrgetter("first.monitor", "first.severity", "first.advice")
    return list(grouped((kinds(group), group) for group in groups).values())


def _what(members: list[AlarmGroup]) -> str:
    told = [group.first.message or group.first.monitor or NOTHING for group in members]
    beyond = len(told) - _MOST_TOLD
    more = f"; and {beyond} more" if beyond > 0 else ""
    return "; ".join(told[:_MOST_TOLD]) + more


def _moment(alarm: AlarmRow) -> int:
    """Return when people say it was: the round of training, or the epoch of one network."""
    return told_round(alarm.round) if _is_in_training(alarm) else alarm.step


def _is_in_training(alarm: AlarmRow) -> bool:
    return bool(alarm.round) or not alarm.step


def _when(members: list[AlarmGroup]) -> str:
    unit = "round" if any(_is_in_training(group.first) for group in members) else "epoch"
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


_COMMAND_LIMIT = 20_000

NOTHING_YET = "so there is nothing to show yet. What the run was asked to do stands below."


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known of a run beside its epochs; absent is None."""

    kind: str = "grow"
    name: str | None = None
    task: str | None = None
    controller: str | None = None
    seed: int | None = None
    state: str | None = None
    """running, interrupted, finished or damaged."""
    note: str | None = None
    planned: int | None = None
    """Epochs, or rounds of training."""
    created: float | None = None
    """Seconds since 1970."""
    resumes: int = 0
    device: str | None = None
    host: str | None = None
    seconds: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Rows of every table, where they are too many to show."""


def so_far(unit: str, done: int, about: About) -> str:
    """Say how far the run was when the report was written, and whether it goes on."""
    told = f"Written after {unit} {format_count(done)}"
    if about.planned is not None:
        told += f" of {format_count(about.planned)}"
    state = {"running": "; the run goes on", "interrupted": "; the run stopped there"}
    return f"{told}{state.get(about.state or '', '')}."


def found_sections(alarms: Sequence[AlarmGroup], about: About) -> Iterator[str]:
    """Return what the monitors found."""
    if alarms:
        yield section("Alarms", render_alarms(list(alarms)))
    elif about.state is not None:
        yield section("Alarms", "<p>The monitors found nothing wrong.</p>\n")


def recorded_section(about: About) -> Iterator[str]:
    """Return how many rows every table has, where that is known."""
    if about.counts:
        pairs = ((table, format_count(count)) for table, count in about.counts.items())
        yield section("Recorded", render_pairs("Rows of every table", pairs, noun="table"))


def origin_sections(
    summary: RunSummary | None,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    about: About,
) -> Iterator[str]:
    """Return how to repeat the run, and every setting."""
    shown = escaped(command, limit=_COMMAND_LIMIT, keep="\n\t")
    body = f"<h3>Command</h3>\n<pre><code>{shown}</code></pre>\n"
    body += "<h3>Run</h3>\n" + render_pairs("The run", _facts(summary, config, about), noun="fact")
    body += "<h3>Versions</h3>\n" + render_pairs("Versions", versions.items(), noun="version")
    yield section("How to repeat it", body)
    settings = list(flatten(config))
    if settings:
        yield section("Configuration", render_pairs("Configuration", settings, noun="setting"))


def _facts(
    summary: RunSummary | None, config: Mapping[str, Any], about: About
) -> Iterator[tuple[str, object]]:
    told: RunSummary | About = about if summary is None else summary
    seed = config.get("seed", "not recorded") if told.seed is None else told.seed
    facts = {
        "name": about.name,
        "state": about.state,
        "note": about.note,
        "task": told.task,
        "controller": told.controller,
        "random seed": seed,
        "epochs": None if summary is None else format_count(summary.epochs),
        "time": None if told.seconds is None else format_duration(told.seconds),
        "device": about.device,
        "started": None if about.created is None else _date(about.created),
        "continued": counted(about.resumes, "time") if about.resumes else None,
    }
    return ((name, fact) for name, fact in facts.items() if fact is not None)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "unknown"
