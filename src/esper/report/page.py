"""The report of a growing run: one HTML file with everything in it, to read, keep and send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.history import EpochRecord, RunSummary, SeedRecord, seed_records
from esper.leyline.storage import atomic_write_text
from esper.report.headline import heading, read_outcome, render_figures, render_lead
from esper.report.picture import DEFAULT_TITLE, draw_picture
from esper.report.style import PAGE_STYLE
from esper.report.tables import flatten, render_decisions, render_pairs, render_seeds
from esper.report.text import escaped, format_count, format_duration

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


def render_report(
    history: Sequence[EpochRecord],
    summary: RunSummary | None,
    *,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
) -> str:
    """Return the report of a run as one self-contained HTML page.

    Args:
        history: The epochs so far, in order; without any, the page says so.
        summary: How the run ended, None while it has not.
        config: The complete settings, nested at will.
        command: The exact command that repeats the run.
        versions: Name and version of everything the result may depend on.
    """
    seeds = _seeds(history, summary)
    title = heading(summary)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{PAGE_STYLE}\n</style>\n</head>\n<body>\n"
        f"<main>\n<header>\n<h1>{escaped(title)}</h1>\n"
        f"{_top(history, summary, seeds)}</header>\n"
        f"{''.join(_growth_sections(history, seeds))}"
        f"{''.join(_origin_sections(summary, config, command, versions))}"
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
    history: Sequence[EpochRecord], summary: RunSummary | None, seeds: Sequence[SeedRecord]
) -> str:
    outcome = read_outcome(history, summary)
    if outcome is None:
        return (
            '<p class="lead">No epochs were recorded, so there is nothing to show yet. What the '
            "run was asked to do stands below.</p>\n"
        )
    missing = ""
    if not history:
        missing = '<p class="note">The epochs of this run are not there: no picture.</p>\n'
    elif summary is None:
        missing = f'<p class="note">Written after epoch {history[-1].epoch}.</p>\n'
    return render_lead(outcome, summary, seeds) + missing + render_figures(outcome, summary, seeds)


def _growth_sections(history: Sequence[EpochRecord], seeds: Sequence[SeedRecord]) -> Iterator[str]:
    if history:
        picture = draw_picture(history, title=DEFAULT_TITLE, is_file=False)
        yield f"<figure>\n{picture}\n<figcaption>{escaped(_CAPTION, limit=1000)}</figcaption>\n"
        yield "</figure>\n"
    if seeds:
        yield _section("Seeds", render_seeds(seeds))
    elif history:
        yield _section("Seeds", "<p>No seed was germinated.</p>\n")
    if any(record.decision is not None and record.decision.op != "WAIT" for record in history):
        yield _section("Decisions", render_decisions(history))
    elif history:
        yield _section("Decisions", "<p>The controller only waited.</p>\n")


def _origin_sections(
    summary: RunSummary | None,
    config: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
) -> Iterator[str]:
    shown = escaped(command, limit=_COMMAND_LIMIT, keep="\n\t")
    body = f"<h3>Command</h3>\n<pre><code>{shown}</code></pre>\n"
    body += "<h3>Run</h3>\n" + render_pairs("The run", _facts(summary, config), noun="fact")
    body += "<h3>Versions</h3>\n" + render_pairs("Versions", versions.items(), noun="version")
    yield _section("How to repeat it", body)
    settings = list(flatten(config))
    if settings:
        yield _section("Configuration", render_pairs("Configuration", settings, noun="setting"))


def _facts(summary: RunSummary | None, config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    if summary is None:
        yield "random seed", config.get("seed", "not recorded")
        return
    yield "task", summary.task
    yield "controller", summary.controller
    yield "random seed", summary.seed
    yield "epochs", format_count(summary.epochs)
    yield "time", format_duration(summary.seconds)


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}</section>\n"
