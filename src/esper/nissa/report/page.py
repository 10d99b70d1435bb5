"""Parts of a report page: templates, sections, tiles, tables, and the style of its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from esper.leyline.reasons import round_number
from esper.leyline.records import RunSummary
from esper.leyline.stages import COOLDOWN_STAGES, MODULE_STAGES
from esper.nissa.monitors import MONITORS
from esper.nissa.report.markup import (
    counted,
    element,
    escaped,
    format_count,
    format_duration,
    tooltip,
    visible,
)
from esper.nissa.schema import AlarmRow
from esper.utils.files import atomic_write_text
from esper.utils.process import grouped


def load_templates(package: str) -> jinja2.Environment:
    """Return the templates of a package, which escape what is put into them."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


TEMPLATES = load_templates("esper.nissa.report")
"""The templates of the report."""

TEMPLATES.filters["visible"] = visible


def render_part(name: str, *values: Any) -> str:
    """Return the result of a macro of `parts.html`."""
    part = getattr(TEMPLATES.get_template("parts.html").module, name)
    return str(part(*values))


def render_page(title: str, top: str, *sections: str) -> str:
    """Return one self-contained HTML page; `top` and the sections are markup."""
    page = TEMPLATES.get_template("report.html")
    return page.render(title=title, top=Markup(top), sections=[Markup(one) for one in sections])


def section(title: str, body: str) -> str:
    """Return one section of a page; the body is markup."""
    return render_part("section", title, Markup(body))


def paragraph(kind: str, text: str) -> str:
    """Return a paragraph with a CSS class."""
    return f'<p class="{kind}">{escaped(text, limit=2000)}</p>\n'


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the main figures as tiles: name, value, and a note that may be empty."""
    return render_part("tiles", list(tiles))


def write_report(path: Path | str, html: str) -> None:
    """Write a report atomically.

    Raises:
        CheckpointError: The file cannot be written; the old one is untouched.
    """
    atomic_write_text(Path(path), html)


MOST_ROWS = 500
"""Rows of a table that are shown; the number of the others is printed below."""

NOTHING = "–"

_LONG = 40


@dataclass(frozen=True, slots=True)
class Column:
    """The header of a column."""

    name: str
    kind: str = ""
    """Class of its cells: number, words (long texts), or none."""


def number_columns(*names: str) -> tuple[Column, ...]:
    """Return the headers of columns of numbers."""
    return tuple(Column(name, "number") for name in names)


def word_columns(*names: str) -> tuple[Column, ...]:
    """Return the headers of columns of text, which take the remaining width."""
    return tuple(Column(name, "words") for name in names)


def figure(drawing: str, caption: str, heading: str = "") -> str:
    """Return a drawing with its caption."""
    title = f"<h2>{heading}</h2>\n" if heading else ""
    text = escaped(caption, limit=1000)
    return f"<figure>\n{title}{drawing}\n<figcaption>{text}</figcaption>\n</figure>\n"


def render_table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[object]], *, noun: str
) -> str:
    """Return a table whose cells show any value as text.

    Args:
        caption: What the table shows, for screen readers.
        columns: The headers.
        rows: The cells; only the first `MOST_ROWS` rows are shown.
        noun: What a row is, for the line about rows that are not shown.
    """
    return render_part("table", caption, columns, rows[:MOST_ROWS], _beyond(len(rows), noun))


def render_pairs(caption: str, pairs: Iterable[tuple[str, object]], *, noun: str) -> str:
    """Return a table of names and values."""
    rows = list(pairs)
    return render_part("pairs", caption, rows[:MOST_ROWS], _beyond(len(rows), noun))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield nested settings as dotted names with their values."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield from _flatten_list(name, value)
        else:
            yield name, "none" if value is None else value


def _flatten_list(name: str, values: Sequence[Any]) -> Iterable[tuple[str, object]]:
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        yield from flatten({f"{name}[{index}]": value for index, value in enumerate(values)})
    else:
        yield name, ", ".join(map(str, values)) or "none"


def _beyond(total: int, noun: str) -> str:
    beyond = total - MOST_ROWS
    return counted(beyond, f"more {noun}") if beyond > 0 else ""


def _cell_kind(column: Column, cell: object) -> str:
    # A long name needs a wide column.
    return column.kind or ("words" if len(str(cell)) > _LONG else "")


TEMPLATES.globals["cell_kind"] = _cell_kind


# --------------------------------------------------------------------------------------- pictures

WIDTH = 760.0
"""Width of the picture in its own units; the page scales it."""

MARGIN = 6.0

FONT = 23.0
"""The largest text size in the picture's units, for phones: 11 pixels at a width of 366 pixels.

Room is reserved for this size; wider screens use smaller texts.
"""

ROW = 27.0
"""Height of a line of text at the largest size."""

STAGE_CLASSES: dict[str, str] = {
    **{stage.name: stage.name.lower() for stage in MODULE_STAGES},
    **{stage.name: "cooldown" for stage in COOLDOWN_STAGES},
}
"""CSS class of each stage; those of an empty slot are missing."""

LEGEND_STAGES = (*(stage.name.lower() for stage in MODULE_STAGES), "cooldown")

PICTURE_STYLE = TEMPLATES.get_template("picture.css").render().strip()

NAMESPACE = "http://www.w3.org/2000/svg"


def draw_svg(
    title: str, description: str, drawing: Sequence[str], height: float, *, is_file: bool
) -> str:
    """Return a picture as SVG, with title and description; as a file it has a namespace."""
    return element(
        "svg",
        tooltip(title),
        element("desc", escaped(description, limit=10_000)),
        element("style", PICTURE_STYLE),
        element("rect", class_="surface", width=WIDTH, height=height),
        *drawing,
        **({"xmlns": NAMESPACE} if is_file else {}),
        class_="growth",
        role="img",
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
    )


# ---- Alarms, command, versions, settings


_ORDER = {"critical": 0, "warning": 1, "info": 2}
_MOST_MESSAGES = 4


@dataclass(slots=True)
class AlarmGroup:
    """Alarms of one monitor about one subject, with one severity."""

    first: AlarmRow
    count: int = 0
    last: int = 0
    """Round of the last one in training, else its epoch."""
    is_over: bool = False


def group_alarms(alarms: Iterable[AlarmRow]) -> list[AlarmGroup]:
    """Return the alarms, the most severe first; repeated ones are one entry."""
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
    """Group the alarms of one monitor with the same severity."""
    kinds = attrgetter("first.monitor", "first.severity", "first.advice")
    return list(grouped((kinds(group), group) for group in groups).values())


def _what(members: list[AlarmGroup]) -> str:
    parts = [group.first.message or group.first.monitor or NOTHING for group in members]
    beyond = len(parts) - _MOST_MESSAGES
    more = f"; and {beyond} more" if beyond > 0 else ""
    return "; ".join(parts[:_MOST_MESSAGES]) + more


def _moment(alarm: AlarmRow) -> int:
    """Return the round of training, or the epoch of one network."""
    return round_number(alarm.round) if _is_in_training(alarm) else alarm.step


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

NOTHING_YET = "so there is nothing to show yet. The settings of the run are below."


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Facts about a run beside its epochs; None if unknown."""

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
    """Rows of every table."""


def so_far(unit: str, done: int, about: About) -> str:
    """Return how far the run was when the report was written, and its state."""
    text = f"Written after {unit} {format_count(done)}"
    if about.planned is not None:
        text += f" of {format_count(about.planned)}"
    state = {"running": "; the run continues", "interrupted": "; the run stopped there"}
    return f"{text}{state.get(about.state or '', '')}."


def found_sections(alarms: Sequence[AlarmGroup], about: About) -> Iterator[str]:
    """Yield the section of alarms."""
    if alarms:
        yield section("Alarms", render_alarms(list(alarms)))
    elif about.state is not None:
        yield section("Alarms", "<p>The monitors found nothing wrong.</p>\n")


def recorded_section(about: About) -> Iterator[str]:
    """Yield the section with the number of rows of every table, if known."""
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
    """Yield the sections on how to repeat the run, and on its settings."""
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
    source: RunSummary | About = about if summary is None else summary
    seed = config.get("seed", "not recorded") if source.seed is None else source.seed
    facts = {
        "name": about.name,
        "state": about.state,
        "note": about.note,
        "task": source.task,
        "controller": source.controller,
        "random seed": seed,
        "epochs": None if summary is None else format_count(summary.epochs),
        "time": None if source.seconds is None else format_duration(source.seconds),
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
