from __future__ import annotations

from esper.nissa.columns import TABLES
from esper.nissa.monitors import MONITORS
from tools.pages.telemetry import render


def test_every_table_column_and_monitor_is_on_it() -> None:
    page = render()
    for table in TABLES.values():
        assert f"### {table.name}\n" in page
        for column in table.columns:
            assert f"| `{column.name}` |" in page
    for name in MONITORS.names():
        assert f"| {name} |" in page
