"""Stores that somebody else made: every question to them ends, and says why in one line."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from esper.leyline.errors import EsperError
from esper.nissa import StoreError, database, find_runs, open_run, open_store, query_run
from esper.nissa.database import TimeLimit
from tests.harness.bad_stores import BAD_STORES, endless_table, endless_view
from tests.nissa.conftest import Clock
from tests.nissa.telling import run_row, tell


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    tell(folder, sinks=())
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


REPLACED = {"a score that is a text", "a number of epochs that is a text"}
"""What continuing a run writes anew."""


@pytest.mark.parametrize("name", [name for name in BAD_STORES if name not in REPLACED])
def test_a_bad_store_is_one_line_for_whoever_continues_it(run: Path, name: str) -> None:
    BAD_STORES[name](run / "run.db")
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"^[^\n]*run\.db[^\n]*$"):
        open_store(run, run_row(), resume=True, sinks=())
    assert time.monotonic() - began < 20


def read_all(run: Path) -> None:
    with open_run(run) as stored:
        assert stored.info
        list(stored.records("epochs"))


@pytest.mark.parametrize("name", [name for name in BAD_STORES if "table" not in name])
def test_a_bad_store_is_one_line_for_whoever_reads_it(run: Path, name: str) -> None:
    BAD_STORES[name](run / "run.db")
    with pytest.raises(EsperError, match=r"^[^\n]*run\.db is damaged[^\n]*$"):
        read_all(run)
    [entry] = find_runs(run)
    assert entry.state == "damaged"
    assert entry.note


def test_a_table_that_never_ends_ends(run: Path) -> None:
    endless_table(run / "run.db")
    with open_run(run) as stored, pytest.raises(StoreError, match="epochs repeats its rows"):
        list(stored.records("epochs"))
    with (
        open_run(run, limit=TimeLimit(0.1)) as stored,
        pytest.raises(StoreError, match=r"did not answer within 0\.1 s"),
    ):
        list(stored.records("epochs", where="train_loss = -1"))
    with pytest.raises(EsperError, match="took longer than"):
        query_run(run, "SELECT SUM(val_score) FROM epochs", timeout_s=0.1)


def test_only_the_time_of_the_store_itself_counts(
    whole: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "time", clock)
    with open_run(whole, limit=TimeLimit(60)) as stored:
        rows = stored.records("epochs")
        first = list(itertools.islice(rows, 5))
        clock.ahead = 61
        assert len(first) + len(list(rows)) == 30


def test_a_question_that_nobody_waits_for_ends(run: Path) -> None:
    endless_table(run / "run.db")
    until = time.monotonic() + 0.1
    limit = TimeLimit(60.0, lambda: time.monotonic() < until)
    with open_run(run, limit=limit) as stored, pytest.raises(BrokenPipeError):
        stored.query("SELECT SUM(val_score) FROM epochs")


def test_one_bad_store_leaves_the_others_in_the_list(whole: Path, tmp_path: Path) -> None:
    for name in ("bad", "good"):
        shutil.copytree(whole, tmp_path / name)
    endless_view(tmp_path / "bad" / "run.db")
    found = {entry.path.name: entry.state for entry in find_runs(tmp_path)}
    assert found == {"bad": "damaged", "good": "finished"}


def test_what_analyze_leaves_is_no_harm(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as change:
        change.execute("ANALYZE")
    change.close()
    with open_run(run) as stored:
        assert stored.info.task == "digits"


def test_a_rollback_journal_is_not_played_back(run: Path) -> None:
    (run / "run.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(600))
    with pytest.raises(StoreError, match=r"run\.db-journal lies beside it"):
        open_store(run, run_row(), resume=True, sinks=())
