from __future__ import annotations

from pathlib import Path

from esper.nissa.columns import TABLES
from esper.nissa.docs import telemetry_page
from esper.nissa.monitors import MONITORS

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == telemetry_page(), (
        "run: python -m esper.nissa.docs > docs/telemetry.md"
    )


def test_every_table_column_and_monitor_is_on_it() -> None:
    page = telemetry_page()
    for table in TABLES.values():
        assert f"### {table.name}\n" in page
        for column in table.columns:
            assert f"| `{column.name}` |" in page
    for name in MONITORS.names():
        assert f"| {name} |" in page
