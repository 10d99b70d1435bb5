from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from esper.growth.history import TABLES, draw_history, make_table
from esper.leyline.errors import UsageError
from esper.leyline.records import EpochRecord, RunSummary
from tests.nissa.report.runs import growing_run, summary_of
from tests.nissa.report.test_stacks import history as deepened_history


@pytest.fixture(scope="module")
def history() -> list[EpochRecord]:
    return list(growing_run())


@pytest.fixture(scope="module")
def summary(history: list[EpochRecord]) -> RunSummary:
    return summary_of(history)


def test_a_picture_shows_itself_and_is_written(history: list[EpochRecord], tmp_path: Path) -> None:
    picture = draw_history(history, "my <net>")
    root = ElementTree.fromstring(picture._repr_svg_())
    assert root.tag.endswith("svg")
    assert "conv_light" in " ".join(root.itertext())
    assert picture.save(tmp_path / "growth.svg").read_text(encoding="utf-8") == picture.svg
    page = picture.save(str(tmp_path / "growth.html")).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<title>my &lt;net&gt;</title>" in page
    assert picture.svg in page
    assert "\n" not in repr(picture)


@pytest.mark.parametrize("name", ["growth.png", "growth"])
def test_a_picture_of_another_kind_is_refused(
    name: str, history: list[EpochRecord], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"written as \.svg or \.html, not .*'growth\.svg'"):
        draw_history(history, "net").save(tmp_path / name)
    with pytest.raises(
        UsageError, match=r"written as \.svg or \.html, not ''; write 'growth\.svg'"
    ):
        draw_history(history, "net").save("")
    assert not list(tmp_path.iterdir())


def test_every_epoch_is_a_row(history: list[EpochRecord], summary: RunSummary) -> None:
    columns = make_table("epochs", history, summary).values()
    assert columns["epoch"] == [one.epoch for one in history]
    assert columns["val_score"] == [one.val_score for one in history]
    assert columns["twin_val_score"] == [one.twin_score for one in history]
    for one, gain in zip(history, columns["val_gain"], strict=True):
        assert gain == (None if one.twin_score is None else one.val_score - one.twin_score)
    kept = [epoch for epoch, is_kept in enumerate(columns["is_kept"], 1) if is_kept]
    assert kept == [summary.kept_epoch]
    acted = [one.decision.op if one.decision else None for one in history]
    assert columns["action"] == acted
    assert columns["action"][-1] is None
    assert "blocks_awake" not in columns


def test_blocks_that_woke_are_told(summary: RunSummary) -> None:
    history = deepened_history()
    columns = make_table("epochs", history, summary).values()
    depths = [one.depth for one in history]
    assert columns["blocks_awake"] == [sum(d.awake.values()) for d in depths if d is not None]
    assert columns["action"] == [None, "DEEPEN", "DEEPEN", None]
    assert columns["reason"][1] == "schedule: 1 to 2 blocks"
    stacks = make_table("stacks", history, summary).values()
    assert (stacks["epoch"], stacks["awake"]) == ([1, 2, 3, 4], [1, 2, 2, 4])


def test_the_other_tables(history: list[EpochRecord], summary: RunSummary) -> None:
    actions = make_table("actions", history, summary).values()
    assert "WAIT" not in actions["op"]
    assert len(actions["op"]) == sum(
        one.op != "WAIT" for record in history for one in record.decisions
    )
    slots = make_table("slots", history, summary).values()
    assert len(slots["epoch"]) == sum(len(one.slots) for one in history)
    seeds = make_table("seeds", history, summary).values()
    assert seeds["blueprint"] == [seed.blueprint for seed in summary.seeds]
    sizes = make_table("sizes", history, summary).values()
    assert sizes["parameters"] == sorted(sizes["parameters"])
    with pytest.raises(UsageError, match=r"table.*'epoch'"):
        make_table("epoch", history, summary)


@pytest.mark.parametrize("name", TABLES)
def test_pandas_has_every_table_with_its_types(
    name: str, history: list[EpochRecord], summary: RunSummary
) -> None:
    pandas = pytest.importorskip("pandas")
    table = make_table(name, history, summary)
    frame = table.to_pandas()
    assert list(frame.columns) == list(table.columns)
    assert len(frame) == len(table.rows)
    if name == "epochs":
        assert frame.dtypes["epoch"] == "int64"
        assert frame.dtypes["val_loss"] == frame.dtypes["twin_val_score"] == "float64"
        assert frame.dtypes["is_kept"] == "bool"
        assert isinstance(frame.dtypes["action"], pandas.StringDtype)
        assert frame["action"].isna().sum() == 1
        assert frame["val_score"].tolist() == [one.val_score for one in history]


@pytest.mark.parametrize("name", TABLES)
def test_polars_has_every_table_with_its_types(
    name: str, history: list[EpochRecord], summary: RunSummary
) -> None:
    polars = pytest.importorskip("polars")
    table = make_table(name, history, summary)
    frame = table.to_polars()
    assert frame.columns == list(table.columns)
    assert frame.height == len(table.rows)
    if name == "epochs":
        assert frame.schema["epoch"] == polars.Int64
        assert frame.schema["twin_val_score"] == polars.Float64
        assert frame.schema["reason"] == polars.String
        assert frame["action"].null_count() == 1


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_what_is_missing_is_named_with_the_line_to_write(
    name: str, history: list[EpochRecord], summary: RunSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.import_module

    def without(module: str, *rest: Any) -> Any:
        if module == name:
            raise ImportError(name)
        return known(module, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.delitem(sys.modules, name, raising=False)
    table = make_table("epochs", history, summary)
    with pytest.raises(UsageError, match=rf"to_{name}\(\) needs {name}: pip install {name}"):
        getattr(table, f"to_{name}")()
