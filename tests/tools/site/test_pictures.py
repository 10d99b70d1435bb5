from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.site.pictures import put_in

DOCS = Path(__file__).parents[3] / "docs"


def test_a_picture_follows_the_switch_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(
        '<?xml version="1.0"?>\n<svg class="a" role="img" viewBox="0 0 1 1"><title>A</title>'
        "<style>.a{--ink:#000}\n@media (prefers-color-scheme:dark){.a{--ink:#fff}}</style></svg>\n",
        encoding="utf-8",
    )
    page = put_in('<p><img alt="An &quot;A&quot;,\nin ink" src="a.svg" /></p>', tmp_path)
    assert page == (
        '<p><svg class="a" viewBox="0 0 1 1" role="img" aria-label="An &quot;A&quot;, in ink">'
        '<style>.a{--ink:#000}\n[data-md-color-scheme="slate"] .a{--ink:#fff}</style></svg></p>'
    )


def test_other_images_stay(tmp_path: Path) -> None:
    page = '<img alt="a" src="a.png"><img alt="b" src="https://x.y/b.svg">'
    assert put_in(page, tmp_path) == page


@pytest.mark.parametrize("path", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda p: p.stem)
def test_a_picture_is_whole_and_loads_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert f"]({path.relative_to(DOCS).as_posix()})" in (DOCS / "concepts.md").read_text("utf-8")
    # Identifiers are those of the page once it is part of one.
    assert all(name.startswith(f"{path.stem}-") for name in re.findall(r' id="([^"]+)"', text))
    dark = put_in(f'<img alt="x" src="{path.name}">', path.parent)
    assert "prefers-color-scheme" not in dark
    assert '[data-md-color-scheme="slate"] .picture{' in dark
