"""The report of a growing run: one HTML file with everything in it, to read, keep and send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from esper.leyline.architecture import ModuleRecord
from esper.leyline.history import EpochRecord, RunSummary, SeedRecord, seed_records
from esper.leyline.storage import atomic_write_text
from esper.report.alarms import AlarmGroup, render_alarms
from esper.report.architecture import draw_architecture
from esper.report.headline import heading, read_outcome, render_figures, render_lead
from esper.report.picture import DEFAULT_TITLE, draw_picture
from esper.report.style import PAGE_STYLE
from esper.report.tables import flatten, render_decisions, render_pairs, render_seeds
from esper.report.text import counted, escaped, format_count, format_duration

# Nothing is fetched and nothing runs, whatever a value in the page tries.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COMMAND_LIMIT = 20_000

_CAPTION = (
    "An epoch reaches from the number before it to its own, so a decision stands where its effect "
    "begins. The light band is a slot's stage, the solid part its alpha; names are blueprints, "
    "and the number at the end of a life is the points lost without the seed, with its standard "
    "error, or a dash where that was never measured. Rest the pointer on a band, a mark or the "
    "curve to read more."
)

_NETWORK = (
    "The host on the left, from its input at the top to its output, with what each module puts "
    "out for one sample; modules without parameters are left out. On the right, the slots on "
    "their outputs: what lives there{when}, or that nothing does."
)


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


def render_report(
    history: Sequence[EpochRecord],
    summary: RunSummary | None,
    *,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    about: About | None = None,
    alarms: Sequence[AlarmGroup] = (),
    modules: Sequence[ModuleRecord] = (),
    at_end: Mapping[str, tuple[float | None, float | None]] | None = None,
) -> str:
    """Return the report of a run as one self-contained HTML page.

    Args:
        history: The epochs so far, in order; without any, the page says so.
        summary: How the run ended, None while it has not.
        config: The complete settings, nested at will.
        command: The exact command that repeats the run.
        versions: Name and version of everything the result may depend on.
        about: What is known of the run beside that.
        alarms: What monitors found.
        modules: What the host is made of, for a drawing.
        at_end: What the seed in a slot was worth at the end, in points, with its standard error.
    """
    about = about or About()
    seeds = _seeds(history, summary)
    title = heading(summary, about.task, about.kind)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{PAGE_STYLE}\n</style>\n</head>\n<body>\n"
        f"<main>\n<header>\n<h1>{escaped(title)}</h1>\n"
        f"{_top(history, summary, seeds, about)}</header>\n"
        f"{''.join(_pictures(history, summary, modules))}"
        f"{''.join(_found_sections(alarms, about))}"
        f"{''.join(_growth_sections(history, seeds, at_end or {}))}"
        f"{''.join(_origin_sections(summary, config, command, versions, about))}"
        "</main>\n</body>\n</html>\n"
    )


def write_report(path: Path | str, html: str) -> None:
    """Write a report so that a reader finds the old one or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    atomic_write_text(Path(path), html)


def _seeds(history: Sequence[EpochRecord], summary: RunSummary | None) -> tuple[SeedRecord, ...]:
    if summary is not None:
        return summary.seeds
    return seed_records(tuple(history)) if history else ()


def _top(
    history: Sequence[EpochRecord],
    summary: RunSummary | None,
    seeds: Sequence[SeedRecord],
    about: About,
) -> str:
    outcome = read_outcome(history, summary)
    if outcome is None:
        if about.counts:
            return '<p class="lead">What was recorded so far stands below.</p>\n'
        return (
            '<p class="lead">No epochs were recorded, so there is nothing to show yet. What the '
            "run was asked to do stands below.</p>\n"
        )
    missing = ""
    if not history:
        missing = '<p class="note">The epochs of this run are not there: no picture.</p>\n'
    elif summary is None:
        missing = f'<p class="note">{escaped(_so_far(history, about))}</p>\n'
    controller = about.controller if summary is None else summary.controller
    return (
        render_lead(outcome, controller, seeds) + missing + render_figures(outcome, summary, seeds)
    )


def _so_far(history: Sequence[EpochRecord], about: About) -> str:
    done = f"Written after epoch {format_count(history[-1].epoch)}"
    if about.planned is not None:
        done += f" of {format_count(about.planned)}"
    state = {"running": "; the run goes on", "interrupted": "; the run stopped there"}
    return f"{done}{state.get(about.state or '', '')}."


def _growth_sections(
    history: Sequence[EpochRecord],
    seeds: Sequence[SeedRecord],
    at_end: Mapping[str, tuple[float | None, float | None]],
) -> Iterator[str]:
    if seeds:
        yield _section("Seeds", render_seeds(seeds, at_end))
    elif history:
        yield _section("Seeds", "<p>No seed was germinated.</p>\n")
    if any(record.decision is not None and record.decision.op != "WAIT" for record in history):
        yield _section("Decisions", render_decisions(history))
    elif history:
        yield _section("Decisions", "<p>The controller only waited.</p>\n")


def _pictures(
    history: Sequence[EpochRecord], summary: RunSummary | None, modules: Sequence[ModuleRecord]
) -> Iterator[str]:
    if history:
        picture = draw_picture(history, title=DEFAULT_TITLE, is_file=False)
        yield f"<figure>\n{picture}\n<figcaption>{escaped(_CAPTION, limit=1000)}</figcaption>\n"
        yield "</figure>\n"
    if not modules:
        return
    slots = history[-1].slots if history else ()
    when = " at the end"
    if summary is None:
        when = f" after epoch {history[-1].epoch}" if history else ""
    picture = draw_architecture(modules, slots, is_file=False)
    caption = escaped(_NETWORK.format(when=when), limit=1000)
    yield f"<figure>\n<h2>Architecture</h2>\n{picture}\n<figcaption>{caption}</figcaption>\n"
    yield "</figure>\n"


def _found_sections(alarms: Sequence[AlarmGroup], about: About) -> Iterator[str]:
    if alarms:
        yield _section("Alarms", render_alarms(list(alarms)))
    elif about.state is not None:
        yield _section("Alarms", "<p>The monitors found nothing wrong.</p>\n")
    if about.counts:
        pairs = ((table, format_count(count)) for table, count in about.counts.items())
        yield _section("Recorded", render_pairs("Rows of every table", pairs, noun="table"))


def _origin_sections(
    summary: RunSummary | None,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    about: About,
) -> Iterator[str]:
    shown = escaped(command, limit=_COMMAND_LIMIT, keep="\n\t")
    body = f"<h3>Command</h3>\n<pre><code>{shown}</code></pre>\n"
    body += "<h3>Run</h3>\n" + render_pairs("The run", _facts(summary, config, about), noun="fact")
    body += "<h3>Versions</h3>\n" + render_pairs("Versions", versions.items(), noun="version")
    yield _section("How to repeat it", body)
    settings = list(flatten(config))
    if settings:
        yield _section("Configuration", render_pairs("Configuration", settings, noun="setting"))


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


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}</section>\n"
