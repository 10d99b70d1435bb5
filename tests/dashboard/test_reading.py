from __future__ import annotations

import math
from pathlib import Path

import pytest

from esper.dashboard import reading
from tests.dashboard.stores import growing, score, training


def column(table: dict, name: str) -> list:  # type: ignore[type-arg]
    return [row[table["columns"].index(name)] for row in table["rows"]]


def test_points_are_the_stores_own(tmp_path: Path) -> None:
    growing(tmp_path)
    table = reading.read_series(tmp_path, "grow")["epochs"]
    assert column(table, "step") == list(range(1, 21))
    assert column(table, "val_score") == [score(step) for step in range(1, 21)]
    assert column(table, "growth") == [1.0] * 3 + [1.5] * 17


def test_an_update_is_shown_after_its_last_pass(tmp_path: Path) -> None:
    training(tmp_path)
    tables = reading.read_series(tmp_path, "train")
    assert column(tables["updates"], "approx_kl") == [0.02] * 3
    assert column(tables["update_heads"], "entropy_conditional") == [0.8] * 6
    assert column(tables["update_heads"], "head") == ["op", "slot"] * 3
    assert column(tables["rounds"], "rollout_seconds") == [5.0] * 3
    assert column(tables["rounds"], "op_counts")[0] == {"WAIT": 4, "GERMINATE": 2}


def test_of_many_points_the_extremes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing(tmp_path)
    monkeypatch.setattr(reading, "MOST_POINTS", 5)
    table = reading.read_series(tmp_path, "grow")["epochs"]
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
    monkeypatch.setattr(reading, "MOST_POINTS", 2)
    table = reading.read_series(tmp_path, "train")["update_heads"]
    assert sorted(column(table, "head")) == ["op"] * 4 + ["slot"] * 4


def test_the_time_left_follows_the_last_rounds(tmp_path: Path) -> None:
    entry = reading.RunEntry(path=tmp_path, state="running", kind="train", done=3, planned=10)
    training(tmp_path)
    assert reading._time_left(tmp_path, entry) == 70.0


def test_a_run_tells_what_it_is(tmp_path: Path) -> None:
    growing(tmp_path)
    told = reading.read_run(tmp_path, "first")
    assert told["run"]["task"] == "digits"
    assert told["settings"] == [["growth.epochs", 20]]
    assert told["progress"]["state"] == "finished"
    assert told["progress"]["gain"] == 2.0
    assert told["progress"]["eta_s"] is None


def test_an_alarm_stands_until_it_is_cleared(tmp_path: Path) -> None:
    from esper.nissa import RunRow, open_store
    from esper.nissa.schema import AlarmRow

    store = open_store(tmp_path, RunRow(kind="train"), sinks=())
    store.write(AlarmRow(monitor="kl", severity="warning"), AlarmRow(monitor="kl", state="cleared"))
    store.write(AlarmRow(monitor="entropy", severity="critical"))
    store.close()
    stands = {
        (row["monitor"], row["state"]): row["stands"] for row in reading.read_alarms(tmp_path)
    }
    assert stands == {
        ("entropy", "raised"): True,
        ("kl", "cleared"): False,
        ("kl", "raised"): False,
    }


def test_data_becomes_strict_json() -> None:
    told = reading.plain(
        {"a": [math.inf, math.nan, 1.5, True, None], "b": "x\u202ey\x00", "c": b"z"}
    )
    assert told["a"] == [None, None, 1.5, True, None]
    assert "\u202e" not in told["b"]
    assert "\x00" not in told["b"]
    assert isinstance(told["c"], str)
