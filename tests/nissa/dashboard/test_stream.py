from __future__ import annotations

import asyncio
import json
from pathlib import Path

from esper.nissa import RunRow, open_store
from esper.nissa.dashboard import stream
from tests.nissa.dashboard.stores import (
    SLOTS,
    asked,
    grow_epoch,
    growing,
    score,
    train_round,
    training,
)


def test_only_what_came_after_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path, RunRow(kind="grow", slots=SLOTS, epochs=20), sinks=())
    for step in (1, 2):
        grow_epoch(store, step)
    store.flush()
    position = asked(tmp_path, stream.read_position)
    grow_epoch(store, 3)
    store.flush()
    now, change = asked(tmp_path, stream.read_change, position)
    rows = change["rows"]["epochs"]
    assert [row[0] for row in rows["rows"]] == [3]
    assert rows["rows"][0][rows["columns"].index("val_score")] == score(3)
    assert change["changed"] == ["epochs", "decisions"]
    assert asked(tmp_path, stream.read_change, now)[1] == {"rows": {}, "changed": []}
    store.close()


def test_a_position_survives_being_written(tmp_path: Path) -> None:
    growing(tmp_path, epochs=2)
    position = asked(tmp_path, stream.read_position)
    assert stream.Position.parse(str(position)) == position
    for text in ("", "x", "a.1.2", str(position) + ".1", str(position).replace(".", ".-")):
        assert stream.Position.parse(text) is None


def test_a_store_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    growing(tmp_path, epochs=2)
    now = asked(tmp_path, stream.read_position)
    ahead = stream.Position(now.store, tuple(row + 1 for row in now.rows))
    assert asked(tmp_path, stream.read_change, ahead)[1] == {"reset": True}
    other = stream.Position("another", now.rows)
    assert asked(tmp_path, stream.read_change, other)[1] == {"reset": True}


def test_many_rows_come_in_several_events(tmp_path: Path) -> None:
    training(tmp_path, rounds=3)
    now = asked(tmp_path, stream.read_position)
    most, stream.MOST_ROWS = stream.MOST_ROWS, 2
    try:
        watch = stream.Watch("a", tmp_path, stream.Position(now.store, (0,) * len(now.rows)))
        told: list[int] = []
        while (found := watch.look()) is not None:
            told += [row[0] for row in found.get("rows", {}).get("rounds", {}).get("rows", [])]
    finally:
        stream.MOST_ROWS = most
    assert told == [0, 1, 2]
    assert watch.position == now


def test_a_store_that_cannot_be_read_is_told_once_and_looked_for_again(tmp_path: Path) -> None:
    watch = stream.Watch("a", tmp_path / "a", None)
    assert "no store" in (watch.look() or {})["error"]
    assert watch.look() is None
    growing(tmp_path / "a", epochs=2)
    assert (watch.look() or {})["progress"]["done"] == 2


def test_events_carry_the_position(tmp_path: Path) -> None:
    training(tmp_path, rounds=1, finish=False)
    heard: list[str] = []

    async def listen() -> None:
        watch = stream.Watch("a", tmp_path, None)
        async for event in stream.events([watch], is_over=lambda: len(heard) == 2, pause_s=0.0):
            heard.append(event)

    asyncio.run(listen())
    start, event = heard
    assert start.startswith("retry:")
    lines = dict(line.split(": ", 1) for line in event.strip().splitlines())
    assert stream.Position.parse(lines["id"]) == asked(tmp_path, stream.read_position)
    assert json.loads(lines["data"])["run"] == "a"


def test_a_growing_round_is_told_while_it_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, RunRow(kind="train", rounds=3), sinks=())
    store.flush()
    watch = stream.Watch("a", tmp_path, None)
    assert (watch.look() or {})["progress"]["state"] == "running"
    train_round(store, 0)
    store.flush()
    found = watch.look() or {}
    assert found["rows"]["rounds"]["rows"][0][0] == 0
    assert found["progress"]["done"] == 1
    store.close()
