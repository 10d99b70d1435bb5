from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.nissa.report import panels as series
from tests.nissa.dashboard.stores import asked, growing, score, training


def column(table: series.Points, name: str) -> list[Any]:
    return [row[table["columns"].index(name)] for row in table["rows"]]


def test_points_are_the_stores_own(tmp_path: Path) -> None:
    growing(tmp_path)
    table = asked(tmp_path, series.read_series, "grow")["epochs"]
    assert column(table, "step") == list(range(1, 21))
    assert column(table, "val_score") == [score(step) for step in range(1, 21)]
    assert column(table, "growth") == [1.0] * 3 + [1.5] * 17


def test_an_update_is_shown_after_its_last_pass(tmp_path: Path) -> None:
    training(tmp_path)
    tables = asked(tmp_path, series.read_series, "train")
    assert column(tables["updates"], "approx_kl") == [0.02] * 3
    assert column(tables["update_heads"], "entropy_conditional") == [0.8] * 6
    assert column(tables["update_heads"], "head") == ["op", "slot"] * 3
    assert column(tables["rounds"], "rollout_seconds") == [5.0] * 3
    assert column(tables["rounds"], "op_counts")[0] == {"WAIT": 4, "GERMINATE": 2}


def test_of_many_points_the_extremes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing(tmp_path)
    monkeypatch.setattr(series, "MOST_POINTS", 5)
    table = asked(tmp_path, series.read_series, "grow")["epochs"]
    assert table["every"] == 4
    assert len(table["rows"]) == 10
    scores = column(table, "val_score")
    assert min(scores) == score(1)
    assert max(scores) == score(20)
    assert column(table, "step") == sorted(column(table, "step"))


def test_of_many_points_every_head_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path, rounds=4)
    monkeypatch.setattr(series, "MOST_POINTS", 2)
    table = asked(tmp_path, series.read_series, "train")["update_heads"]
    assert sorted(column(table, "head")) == ["op"] * 4 + ["slot"] * 4


def test_a_part_has_its_own_points_closer_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing(tmp_path)
    monkeypatch.setattr(series, "MOST_POINTS", 5)
    table = asked(tmp_path, series.read_series, "grow", (7, 11))["epochs"]
    assert table["every"] == 1
    assert column(table, "step") == [7, 8, 9, 10, 11]
    assert column(table, "val_score") == [score(step) for step in range(7, 12)]
    wider = asked(tmp_path, series.read_series, "grow", (7, 16))["epochs"]
    assert wider["every"] == 2
    assert set(column(wider, "step")) == set(range(7, 17))
    assert asked(tmp_path, series.read_series, "grow", (30, 40))["epochs"]["rows"] == []


def test_a_part_of_a_training_run_is_the_same_part_of_every_table(tmp_path: Path) -> None:
    training(tmp_path, rounds=4)
    tables = asked(tmp_path, series.read_series, "train", (1, 2))
    assert {name: sorted(set(column(table, "round"))) for name, table in tables.items()} == {
        name: [1, 2] for name in ("rounds", "updates", "update_heads")
    }
