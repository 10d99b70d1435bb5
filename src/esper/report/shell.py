"""What every report has around it: the page itself, its sections, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from esper.leyline.files import atomic_write_text
from esper.report.style import PAGE_STYLE
from esper.report.text import escaped

# Nothing is fetched and nothing runs, whatever a value in the page tries.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(title: str, top: str, *sections: str, style: str = PAGE_STYLE) -> str:
    """Return one self-contained HTML page; `top` and the sections are markup."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"<main>\n<header>\n<h1>{escaped(title)}</h1>\n{top}</header>\n"
        f"{''.join(sections)}"
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Return one section of a page; the body is markup."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}</section>\n"


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the few numbers to remember: a name, a value, and a note that may be empty."""
    body = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}"
        + (f"<small>{escaped(note)}</small>" if note else "")
        + "</dd></div>\n"
        for name, value, note in tiles
    )
    return f'<dl class="figures">\n{body}</dl>\n'


def write_report(path: Path | str, html: str) -> None:
    """Write a report so that a reader finds the old one or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    atomic_write_text(Path(path), html)
