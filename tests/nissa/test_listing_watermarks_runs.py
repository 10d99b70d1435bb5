from __future__ import annotations

import sqlite3
import time

import pytest

from esper.nissa.database import StoreError
from esper.nissa.listing import change_run, insert_run, read_run
from tests.nissa.telling import run_row


def test_a_run_begins_with_an_id_a_time_and_what_was_said_of_it(
    connection: sqlite3.Connection,
) -> None:
    insert_run(connection, run_row())
    run = read_run(connection)
    assert len(str(run.run_id)) == 16
    assert abs(time.time() - float(run.created or 0)) < 60
    assert (run.status, run.resumes) == ("running", 0)
    assert (run.task, run.slots, run.config) == ("digits", ["r0c0", "r0c1"], run_row().config)


def test_a_change_leaves_the_other_columns_alone(connection: sqlite3.Connection) -> None:
    insert_run(connection, run_row())
    before = read_run(connection)
    change_run(connection, {"status": "finished", "config": {"epochs": 7}})
    after = read_run(connection)
    assert (after.status, after.config) == ("finished", {"epochs": 7})
    assert (after.run_id, after.task, after.seed) == (before.run_id, before.task, before.seed)


def test_a_store_without_a_run_is_damaged(connection: sqlite3.Connection) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        read_run(connection)
