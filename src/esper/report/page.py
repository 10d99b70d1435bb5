"""The report of a growing run: one HTML file with everything in it, to read, keep and send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper.leyline.reasons import why_nothing_grew
from esper.leyline.records import EpochRecord, ModuleRecord, RunSummary, SeedRecord, seed_records
from esper.report.architecture import draw_architecture
from esper.report.headline import heading, read_outcome, render_figures, render_lead
from esper.report.markup import escaped, format_count
from esper.report.origin import About, AlarmGroup, found_sections, origin_sections, recorded_section
from esper.report.picture import DEFAULT_TITLE, draw_picture
from esper.report.style import render_page, section
from esper.report.tables import render_decisions, render_seeds

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
    return render_page(
        title,
        _top(history, summary, seeds, about),
        *_pictures(history, summary, modules),
        *found_sections(alarms, about),
        *recorded_section(about),
        *_growth_sections(history, seeds, at_end or {}),
        *origin_sections(summary, config, command, versions, about),
    )


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
    why = () if summary is None else why_nothing_grew(history)
    lead = render_lead(outcome, controller, seeds, why)
    return lead + missing + render_figures(outcome, summary, seeds)


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
        yield section("Seeds", render_seeds(seeds, at_end))
    elif history:
        yield section("Seeds", "<p>No seed was germinated.</p>\n")
    if any(record.decision is not None and record.decision.op != "WAIT" for record in history):
        yield section("Decisions", render_decisions(history))
    elif history:
        yield section("Decisions", "<p>The controller only waited.</p>\n")


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
