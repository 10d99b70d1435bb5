"""What a page is made of: templates, sections, tiles, tables, and the look of its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from esper.leyline.files import atomic_write_text
from esper.leyline.stages import COOLDOWN_STAGES, MODULE_STAGES
from esper.report.markup import counted, element, escaped, tooltip, visible


def load_templates(package: str) -> jinja2.Environment:
    """Return the templates of a package; what is put into them is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


TEMPLATES = load_templates("esper.report")
"""The templates of the report; what one of them has made is not escaped again."""

TEMPLATES.filters["visible"] = visible


def render_part(name: str, *values: Any) -> str:
    """Return one part of a page: a macro of `parts.html` with its values."""
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
    """Return a paragraph of a class: the lead of a page, or a note beside something."""
    return f'<p class="{kind}">{escaped(text, limit=2000)}</p>\n'


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the few numbers to remember: a name, a value, and a note that may be empty."""
    return render_part("tiles", list(tiles))


def write_report(path: Path | str, html: str) -> None:
    """Write a report so that a reader finds the old one or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    atomic_write_text(Path(path), html)


MOST_ROWS = 500
"""A table shows no more rows than this and says how many there are beyond."""

NOTHING = "–"

_LONG = 40


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column."""

    name: str
    kind: str = ""
    """Class of its cells: number, words (long texts), or none."""


def number_columns(*names: str) -> tuple[Column, ...]:
    """Return the heads of columns of numbers."""
    return tuple(Column(name, "number") for name in names)


def word_columns(*names: str) -> tuple[Column, ...]:
    """Return columns of sentences, which take what room is left."""
    return tuple(Column(name, "words") for name in names)


def figure(drawing: str, caption: str, heading: str = "") -> str:
    """Return a drawing with what it shows."""
    title = f"<h2>{heading}</h2>\n" if heading else ""
    told = escaped(caption, limit=1000)
    return f"<figure>\n{title}{drawing}\n<figcaption>{told}</figcaption>\n</figure>\n"


def render_table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[object]], *, noun: str
) -> str:
    """Return a table whose cells show any value as text.

    Args:
        caption: What the table holds, for those who meet it without its surroundings.
        columns: The heads, one for every cell of a row.
        rows: The cells; only the first `MOST_ROWS` rows are shown.
        noun: What a row is, for the line about those not shown.
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
    # A long name in a narrow column would become a tower of syllables.
    return column.kind or ("words" if len(str(cell)) > _LONG else "")


TEMPLATES.globals["cell_kind"] = _cell_kind


# --------------------------------------------------------------------------------------- pictures

WIDTH = 760.0
"""Width of the picture in its own units; it is scaled to the space it gets."""

MARGIN = 6.0

FONT = 23.0
"""The largest text size in the picture's units, used on phones: 11 pixels at 366 pixels' width.

Room is reserved for this size everywhere; wider screens use smaller sizes and have air to spare.
"""

ROW = 27.0
"""Height of a line of text at the largest size."""

STAGE_CLASSES: dict[str, str] = {
    **{stage.name: stage.name.lower() for stage in MODULE_STAGES},
    **{stage.name: "cooldown" for stage in COOLDOWN_STAGES},
}
"""What is drawn for a stage, by its name; stages of an empty slot are not here."""

LEGEND_STAGES = (*(stage.name.lower() for stage in MODULE_STAGES), "cooldown")

PICTURE_STYLE = TEMPLATES.get_template("picture.css").render().strip()

NAMESPACE = "http://www.w3.org/2000/svg"


def draw_svg(
    title: str, description: str, drawing: Sequence[str], height: float, *, is_file: bool
) -> str:
    """Return a picture with what names it to screen readers.

    As a file of its own it has a namespace, which it lacks inside a page.
    """
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
