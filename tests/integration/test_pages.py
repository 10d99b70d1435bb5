from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

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
