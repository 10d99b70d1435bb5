"""The documentation site in a real browser; it is built here, as `make docs` builds it."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tools.site.__main__ import build

PAGES = ("index", "tutorial", "concepts", "commands", "settings", "reference/esper", "glossary")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    assert build(folder) == []
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def open_page(browser: Browser, address: str, site: Path) -> Iterator[Callable[..., Page]]:
    """Open pages of the site; in the end none may have had an error or asked another machine."""
    from_disk = f"{site.as_uri()}/"
    problems: list[str] = []
    contexts = []

    def open_one(
        name: str, *, width: int = 1280, theme: str = "light", is_served: bool = True
    ) -> Page:
        base = address if is_served else from_disk
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "console",
            lambda told: problems.append(told.text) if told.type in ("error", "warning") else None,
        )
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((base, "data:")) else problems.append(asked.url)
            ),
        )
        page.goto(f"{base}{name}.html")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window(name: str, width: int, open_page: Callable[..., Page]) -> None:
    page = open_page(name, width=width)
    expect(page.locator("article h1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "from disk"])
def test_a_search_finds_a_page(is_served: bool, open_page: Callable[..., Page]) -> None:
    page = open_page("index", is_served=is_served)
    page.get_by_role("textbox", name="Search").press_sequentially("germinate")
    found = page.locator(".md-search-result__link").first
    expect(found).to_be_visible()
    found.click()
    expect(page.locator("article")).to_contain_text(re.compile("germinate", re.IGNORECASE))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("deepen a GPT", r"(tutorial-gpt|how-to/deepen)\.html"),
        ("adapt a frozen model", r"how-to/adapt-a-finished-model\.html"),
        ("add a blueprint", r"how-to/add-a-blueprint\.html"),
    ],
)
def test_a_search_finds_the_page_for_users_before_records(
    words: str, expected: str, open_page: Callable[..., Page]
) -> None:
    page = open_page("index")
    page.get_by_role("textbox", name="Search").press_sequentially(words)
    first = page.locator(".md-search-result__link").first
    expect(first).to_have_attribute("href", re.compile(expected))


def test_a_word_leads_to_the_glossary(open_page: Callable[..., Page]) -> None:
    page = open_page("how-to/choose-slots")
    page.locator("a.term", has_text="slot").first.click()
    expect(page.locator("#term-slot")).to_have_text("slot")
    expect(page.locator("#term-slot")).to_be_in_viewport()


def test_pictures_follow_the_switch_of_the_page(open_page: Callable[..., Page]) -> None:
    page = open_page("concepts")
    picture = page.locator("svg.picture").first
    ink = "element => getComputedStyle(element).getPropertyValue('--ink')"
    assert picture.evaluate(ink) == "#19212a"
    page.locator("label[title=Dark]").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    assert picture.evaluate(ink) == "#e8ecf1"


def test_signatures_are_laid_out(open_page: Callable[..., Page]) -> None:
    page = open_page("reference/esper")
    signature = page.locator(".doc-signature").first
    arguments = "\n    model: Module | str | Path,\n    slots: SlotNames = AUTO,\n"
    assert arguments in signature.inner_text()
