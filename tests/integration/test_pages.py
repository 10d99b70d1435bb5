from __future__ import annotations

import re
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
