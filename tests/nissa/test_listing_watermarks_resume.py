from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from esper.nissa import StoreError, open_run, open_store, query_run
from esper.nissa.listing import read_positions
from esper.nissa.schema import EpochRow
from tests.nissa.sinks.event_file import scalars
from tests.nissa.telling import EPOCHS, contents, run_row, tell


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tell(folder)
    return folder


def compare(folder: Path, whole: Path) -> None:
    found, wanted = contents(folder), contents(whole)
    for table in wanted:
        assert found[table] == wanted[table], table
    assert scalars(folder / "tb", volatile=False) == scalars(whole / "tb", volatile=False)


def test_the_made_up_run_has_something_in_every_table(uninterrupted: Path) -> None:
    assert all(contents(uninterrupted).values())
    states = query_run(uninterrupted, "SELECT DISTINCT state FROM alarms").rows
    assert {state for (state,) in states} == {"raised", "cleared"}


def test_two_identical_runs_hold_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    tell(tmp_path, marks={})
    compare(tmp_path, uninterrupted)


@pytest.mark.parametrize(("stop", "back_to"), [(7, 5), (10, 10), (18, 15), (19, 5), (29, 25)])
@pytest.mark.parametrize("crash", [True, False])
def test_a_resumed_run_holds_what_an_uninterrupted_one_holds(
    uninterrupted: Path, tmp_path: Path, stop: int, back_to: int, crash: bool
) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, stop_after=stop, marks=marks, crash=crash)
    # As it comes back from a checkpoint.
    mark = json.loads(json.dumps(marks[back_to]))
    tell(tmp_path, resume=mark, start=back_to, marks=marks)
    compare(tmp_path, uninterrupted)
    with open_run(tmp_path) as run:
        assert (run.info.status, run.info.resumes) == ("finished", 1)
        told = run.rows("events", where="volatile = 1")
    assert [event["kind"] for event in told] == ["checkpoint_loaded"]


def test_a_run_may_be_resumed_again_and_again(uninterrupted: Path, tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, stop_after=8, marks=marks, crash=True)
    for stop in (9, 13, 13, 22):
        start = max(marks)
        tell(tmp_path, resume=marks[start], start=start, stop_after=stop, marks=marks, crash=True)
    tell(tmp_path, resume=marks[20], start=20)
    compare(tmp_path, uninterrupted)
    with open_run(tmp_path) as run:
        assert run.info.resumes == 5


def test_a_run_without_a_checkpoint_starts_over(uninterrupted: Path, tmp_path: Path) -> None:
    tell(tmp_path, stop_after=4, crash=True)
    tell(tmp_path, resume=True)
    compare(tmp_path, uninterrupted)


def test_a_finished_run_can_be_extended(uninterrupted: Path, tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, marks=marks)
    with open_store(tmp_path, run_row(), resume=marks[EPOCHS], sinks=()):
        info = query_run(tmp_path, "SELECT status, val_score, ended, parameters FROM runs").rows
        assert info == [("running", None, None, None)]
    with open_run(tmp_path) as run:
        assert len(run.rows("epochs")) == EPOCHS


def test_a_checkpoint_goes_on_without_its_store(tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, stop_after=6, marks=marks)
    (tmp_path / "run.db").unlink()
    tell(tmp_path, resume=marks[5], start=5)
    with open_run(tmp_path) as run:
        assert [row["step"] for row in run.rows("epochs")] == list(range(6, EPOCHS + 1))
        kinds = [row["kind"] for row in run.rows("events", where="volatile = 1")]
    assert kinds == ["store_restarted", "checkpoint_loaded"]


def test_the_store_of_another_run_is_refused(tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    others: dict[int, dict[str, Any]] = {}
    tell(tmp_path / "a", stop_after=6, marks=marks)
    tell(tmp_path / "b", stop_after=6, marks=others)
    with pytest.raises(StoreError, match="belongs to another run than the checkpoint"):
        open_store(tmp_path / "a", run_row(), resume=others[5])


def test_a_store_that_is_behind_its_checkpoint_is_refused(tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path / "run", stop_after=5, marks=marks)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    tell(tmp_path / "run", resume=marks[5], start=5, stop_after=10, marks=marks)
    with pytest.raises(StoreError, match=r"holds less than the checkpoint knows \(in rounds, "):
        open_store(tmp_path / "copy", run_row(), resume=marks[10])


def test_old_watermarks_are_forgotten_and_numbers_go_on(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        for step in range(1, 101):
            store.write(EpochRow(step=step))
            mark = store.watermark()
    assert mark["number"] == 100
    assert mark["positions"]["epochs"] == 100
    found = query_run(tmp_path, "SELECT COUNT(*), MIN(number) FROM watermarks").rows
    assert found == [(64, 37)]


def test_the_mark_a_run_went_back_to_stays_and_later_ones_go(tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, stop_after=12, marks=marks)
    with open_store(tmp_path, run_row(), resume=marks[5], sinks=()) as store:
        found = query_run(tmp_path, "SELECT MAX(number) FROM watermarks").rows
        assert found == [(marks[5]["number"],)] != [(marks[10]["number"],)]
        assert store.watermark()["number"] == marks[5]["number"] + 1


def test_vacuuming_does_not_move_a_watermark(tmp_path: Path, uninterrupted: Path) -> None:
    marks: dict[int, dict[str, Any]] = {}
    tell(tmp_path, stop_after=12, marks=marks)
    connection = sqlite3.connect(tmp_path / "run.db")
    before = read_positions(connection)
    connection.execute("VACUUM")
    assert read_positions(connection) == before
    connection.close()
    tell(tmp_path, resume=marks[10], start=10)
    compare(tmp_path, uninterrupted)


def test_a_run_may_go_on_with_other_settings(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(rounds=10, config={"clip": 0.2}), sinks=()) as store:
        mark = store.watermark()
    changed = run_row(rounds=20, config={"clip": 0.1})
    with open_store(tmp_path, changed, resume=mark, sinks=()) as store:
        store.finish("finished")
    with open_run(tmp_path) as run:
        assert (run.info.rounds, run.info.config) == (20, {"clip": 0.1})
