from __future__ import annotations

import pytest

from esper.nissa.columns import TABLES
from esper.nissa.report.panels import COMPUTED, panels_for, series_for


@pytest.mark.parametrize("kind", ["train", "grow"])
def test_every_panel_shows_columns_that_are_recorded(kind: str) -> None:
    for series in series_for(kind):
        known = set(TABLES[series.table].names) | set(COMPUTED)
        assert {series.x, *series.columns, *series.json} <= known
        assert series.by is None or series.by in known


@pytest.mark.parametrize("kind", ["train", "grow"])
def test_keys_are_unique_and_every_panel_has_something_to_draw(kind: str) -> None:
    panels = panels_for(kind)
    assert len({panel.key for panel in panels}) == len(panels)
    for panel in panels:
        assert bool(panel.lines) != bool(panel.each)
        assert all((line.low is None) == (line.high is None) for line in panel.lines)


def test_another_kind_of_run_has_no_panels() -> None:
    assert panels_for("prove") == ()
    assert series_for("prove") == ()
