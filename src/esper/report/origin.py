"""Where a run came from and what was found in it: alarms, command, versions, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from esper.leyline.records import RunSummary
from esper.report.alarms import AlarmGroup, render_alarms
from esper.report.shell import section
from esper.report.tables import flatten, render_pairs
from esper.report.text import counted, escaped, format_count, format_duration

_COMMAND_LIMIT = 20_000


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
    if about.name is not None:
        yield "name", about.name
    if about.state is not None:
        yield "state", about.state
    if about.note is not None:
        yield "note", about.note
    if summary is not None:
        yield "task", summary.task
        yield "controller", summary.controller
        yield "random seed", summary.seed
        yield "epochs", format_count(summary.epochs)
        yield "time", format_duration(summary.seconds)
    else:
        for name, value in (("task", about.task), ("controller", about.controller)):
            if value is not None:
                yield name, value
        seed = config.get("seed", "not recorded") if about.seed is None else about.seed
        yield "random seed", seed
        if about.seconds is not None:
            yield "time", format_duration(about.seconds)
    if about.device is not None:
        yield "device", about.device
    if about.created is not None:
        yield "started", _date(about.created)
    if about.resumes:
        yield "continued", f"{counted(about.resumes, 'time')}"


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "unknown"
