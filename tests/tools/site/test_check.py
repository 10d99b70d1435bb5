from __future__ import annotations

from pathlib import Path

import pytest

from tools.site.check import findings, main


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">A</h1><a href="sub/b.html#here">b</a>')
    (tmp_path / "sub" / "b.html").write_text(
        '<p id="here"></p><a href="../index.html#top">a</a> <a href="https://x.y">x</a>'
        '<a href="#here">h</a><script src="b.js?v=1"></script><link rel="canonical" href="//c">'
    )
    (tmp_path / "sub" / "b.js").write_text("")
    (tmp_path / "a.css").write_text('@font-face{src:url("f.woff2")} a{background:url(data:x)}')
    return tmp_path


def test_a_site_that_is_whole(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(site)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("html", "finding"),
    [
        ('<script src="https://cdn.x/y.js"></script>', "loads https://cdn.x/y.js from elsewhere"),
        ('<link rel="preconnect" href="//f.x">', "loads //f.x from elsewhere"),
        ('<img src="a.png" srcset="http://x/y.png 2x">', "loads http://x/y.png from elsewhere"),
        ("<style>@import 'https://x/a.css'</style>", "loads https://x/a.css from elsewhere"),
        ('<p style="background:url(http://x/i.png)">', "loads http://x/i.png from elsewhere"),
        ('<img src="none.png">', "loads none.png, which does not exist"),
        ('<a href="none.html">', "links to none.html, which does not exist"),
        ('<a href="sub/b.html#no">', "links to sub/b.html#no, but there is no 'no' there"),
        ('<a href="#no">', "links to #no, but there is no 'no' there"),
    ],
)
def test_what_is_found(
    site: Path, html: str, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "a.png").write_text("")
    (site / "new.html").write_text(html)
    assert list(findings(site)) == [f"new.html: {finding}"]
    assert main([str(site)]) == 1
    assert finding in capsys.readouterr().out


def test_styles_are_read_too(site: Path) -> None:
    (site / "a.css").write_text("@import url(https://fonts.x/css)")
    assert list(findings(site)) == ["a.css: loads https://fonts.x/css from elsewhere"]


def test_what_is_no_site_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "make docs" in capsys.readouterr().err
