"""How reports look and what every one has around it: sizes, the templates, the page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from esper.leyline.files import atomic_write_text
from esper.leyline.stages import COOLDOWN_STAGES, MODULE_STAGES
from esper.report.markup import visible

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

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("esper.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates of the report; what is put into them is escaped unless it was made by one."""

TEMPLATES.filters["visible"] = visible

PICTURE_STYLE = TEMPLATES.get_template("picture.css").render().strip()


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


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the few numbers to remember: a name, a value, and a note that may be empty."""
    return render_part("tiles", list(tiles))


def write_report(path: Path | str, html: str) -> None:
    """Write a report so that a reader finds the old one or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    atomic_write_text(Path(path), html)
