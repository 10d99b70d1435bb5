"""The page that maps the design documents names code, tests and records that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_review_checks import names_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "documents.md"
CODE = re.compile(r"`([a-z_0-9/]+\.py)`")
TEST = re.compile(r"`([a-z_0-9/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def sections() -> dict[str, list[list[str]]]:
    """Return the rows of every document's table, each as its four cells."""
    found = {}
    for number, body in re.findall(r"^## (\d{3}): .*?\n(.*?)(?=^## |\Z)", text(), re.M | re.S):
        rows = [line.strip("|").split(" | ") for line in body.splitlines() if line[:1] == "|"]
        found[number] = [[cell.strip() for cell in row] for row in rows[2:]]
    return found


def test_every_section_has_code_a_test_and_a_word_about_records() -> None:
    found = sections()
    assert sorted(found) == ["000", "001", "002", "003", "004"]
    assert sum(map(len, found.values())) > 60
    for number, rows in found.items():
        for row in rows:
            assert len(row) == 4, f"{number}: {row}"
            name, code, tests, record = row
            assert CODE.search(code), f"{number}, {name}: no code"
            assert TEST.search(tests), f"{number}, {name}: no test"
            assert record, f"{number}, {name}: no record, and no dash either"


def test_every_file_it_names_exists() -> None:
    missing = {
        path for path in CODE.findall(text()) if not (ROOT / "src" / "esper" / path).is_file()
    }
    assert missing == set()


@pytest.mark.parametrize("path", sorted({path for path, _ in TEST.findall(text())}))
def test_every_test_it_names_exists(path: str) -> None:
    assert (ROOT / "tests" / path).is_file(), f"{path} is gone"
    named = {name for other, name in TEST.findall(text()) if other == path}
    known = names_in(f"tests/{path}")
    assert named <= known, f"not in {path}: {sorted(named - known)}"


@pytest.mark.parametrize("page", ["docs/documents.md", "docs/decisions/0009-design-documents.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_decision_is_one_that_pages_may_link_to() -> None:
    """Reasons stand in the repository: no page refers to notes that a reader does not have."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    hidden = re.compile(r"decisions §|domain §|\bdomain \d|\bdecisions \d\b|interfaces\.md")
    assert [str(page) for page in pages if hidden.search(page.read_text(encoding="utf-8"))] == []
