from __future__ import annotations

import math
from pathlib import Path

from esper.nissa.dashboard import stream as reading
from tests.nissa.dashboard.stores import asked, deepening, growing, training


def test_the_time_left_follows_the_last_rounds(tmp_path: Path) -> None:
    entry = reading.RunEntry(path=tmp_path, state="running", kind="train", done=3, planned=10)
    training(tmp_path)
    assert asked(tmp_path, reading._time_left, entry) == 70.0


def test_a_run_tells_what_it_is(tmp_path: Path) -> None:
    growing(tmp_path)
    told = asked(tmp_path, reading.read_run, "first")
    assert told["run"]["task"] == "digits"
    assert told["settings"] == [["growth.epochs", 20]]
    assert told["progress"]["state"] == "finished"
    assert told["progress"]["val_gain"] == 2.0
    assert told["progress"]["eta_s"] is None


def test_a_deepened_run_has_panels_of_its_own(tmp_path: Path) -> None:
    growing(tmp_path / "grown")
    deepening(tmp_path / "deep")
    grown, deep = (
        {panel["key"] for panel in asked(tmp_path / name, reading.read_run, name)["panels"]}
        for name in ("grown", "deep")
    )
    assert grown - deep == {"seeds"}
    assert deep - grown == {"compute"}


def test_an_alarm_stands_until_it_is_cleared(tmp_path: Path) -> None:
    from esper.nissa import RunRow, open_store
    from esper.nissa.schema import AlarmRow

    store = open_store(tmp_path, RunRow(kind="train"), sinks=())
    store.write(AlarmRow(monitor="kl", severity="warning"), AlarmRow(monitor="kl", state="cleared"))
    store.write(AlarmRow(monitor="entropy", severity="critical"))
    store.close()
    stands = {
        (row["monitor"], row["state"]): row["stands"]
        for row in asked(tmp_path, reading.read_alarms)
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
