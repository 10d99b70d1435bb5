"""The page that says which test answers which check names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "review-checks.md"
TEST = re.compile(r"`([\w/.]+\.py)::([^`]+)`")
LINK = re.compile(r"\]\(([^)#]+\.md)\)")


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def answers() -> dict[int, list[list[str]]]:
    """Return the rows of every phase's table, each as its cells."""
    found = {}
    for number, section in re.findall(r"^## Phase (\d): .*?\n(.*?)(?=^## )", text(), re.M | re.S):
        rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
        found[int(number)] = [[cell.strip() for cell in row] for row in rows[2:]]
    return found


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the tests in a file; those of a class follow its name and `::`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return frozenset(name for name in found if name.split("::")[-1].startswith("test_"))


@pytest.mark.parametrize("path", sorted({path for path, _ in TEST.findall(text())}))
def test_every_test_on_the_page_exists(path: str) -> None:
    assert (ROOT / path).is_file(), f"{path} is gone"
    named = {name for other, name in TEST.findall(text()) if other == path}
    assert named <= names_in(path), f"not in {path}: {sorted(named - names_in(path))}"


def test_all_eight_phases_are_answered() -> None:
    found = answers()
    assert sorted(found) == list(range(1, 9))
    for phase, rows in found.items():
        assert rows
        for row in rows:
            assert len(row) == 3, f"phase {phase}: {row}"
            check, answer, reward = row
            assert TEST.search(answer) or LINK.search(answer), f"phase {phase}: {check}"
            assert reward, f"phase {phase}: {check}"


def test_every_decision_it_refers_to_exists() -> None:
    named = set(LINK.findall(text()))
    assert named
    assert all((PAGE.parent / name).is_file() for name in named)
