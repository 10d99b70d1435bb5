from __future__ import annotations

import ast
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from tests.pages import section

ROOT = Path(__file__).parents[2]


def test_every_file_on_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page))
    assert len(named) > 40
    missing = [name for name in sorted(named) if not (ROOT / "src" / "esper" / name).is_file()]
    assert missing == []


def test_the_step_the_page_names_is_there() -> None:
    from esper.kasmina.row_group import RowGroup

    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`RowGroup\.(\w+)`", page):
        assert callable(getattr(RowGroup, name))


WALK = re.compile(
    r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| [^|]+ \| ([^|]+) \|$", re.MULTILINE
)


def calls_in(path: Path) -> set[str]:
    """Return the names of everything that a file calls."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            found |= set() if name is None else {name}
    return found


@pytest.mark.parametrize("heading", ["One batch of `esper.grow`", "One round of `esper train`"])
def test_every_row_of_a_walk_is_called_by_the_row_that_it_names(heading: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "esper"
    rows = {int(row[0]): row[1:] for row in WALK.findall(section(page, heading))}
    assert sorted(rows) == list(range(1, len(rows) + 1))
    assert len(rows) > 25
    for number, (path, function, caller) in rows.items():
        module = import_module("esper." + path.removesuffix(".py").replace("/", "."))
        assert callable(attrgetter(function)(module)), function
        if caller.isdigit():
            assert int(caller) < number
            name = function.split(".")[-1]
            assert name in calls_in(source / rows[int(caller)][0]), f"row {number}: {function}"


def documented() -> dict[str, set[str]]:
    """What the pages of the reference are made from: page -> names."""
    return {
        path.stem: set(re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in (ROOT / "docs" / "reference").glob("*.md")
    }


def test_every_public_name_is_in_the_reference() -> None:
    import esper
    import esper.testing

    pages = documented()
    public = {f"esper.{name}" for name in esper.__all__ if name != "__version__"}
    assert {name for name in public if "register_" in name} <= pages["plug-ins"]
    assert {name for name in public if "register_" not in name} == pages["esper"]
    checks = {f"esper.testing.{name}" for name in esper.testing.__all__ if name.startswith("check")}
    assert checks <= pages["plug-ins"]
    # Read, not imported: Gymnasium need not be installed.
    text = (ROOT / "src" / "esper" / "lab" / "envs" / "__init__.py").read_text(encoding="utf-8")
    listed = re.search(r"__all__ = \[(.*?)\]", text, re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"(\w+)"', listed[1])) - {"ENV_ID"}
    assert {f"esper.lab.envs.{name}" for name in names} <= pages["integrations"]


def test_what_the_plug_in_page_names_exists() -> None:
    for name in documented()["plug-ins"]:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
