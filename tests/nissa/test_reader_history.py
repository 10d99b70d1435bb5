from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from esper.leyline.records import seed_records
from esper.nissa import open_run, query_run, read_history
from tests.nissa.telling import EPOCHS, HISTORY, tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grown") / "run"
    tell(made, sinks=())
    return made


def test_a_history_comes_back_as_it_was(folder: Path) -> None:
    with open_run(folder) as run:
        assert read_history(run) == HISTORY


def test_seeds_are_what_the_history_says(folder: Path) -> None:
    with open_run(folder) as run:
        (row,) = run.rows("seeds")
    (seed,) = seed_records(HISTORY)
    assert {name: row[name] for name in dataclasses.asdict(seed)} == dataclasses.asdict(seed)


def test_events_say_what_changed(folder: Path) -> None:
    found = query_run(
        folder, "SELECT step, kind FROM events WHERE round = 0 ORDER BY step, ordinal"
    ).rows
    assert found == [
        (0, "training_started"),
        (4, "tamiyo_initiated"),
        (5, "seed_germinated"),
        (6, "seed_stage_changed"),
        (8, "seed_gate_evaluated"),
        (11, "seed_stage_changed"),
        (16, "seed_stage_changed"),
        (19, "seed_fossilized"),
    ]


def test_there_is_no_decision_after_the_last_epoch(folder: Path) -> None:
    assert query_run(folder, "SELECT MAX(step) FROM decisions").rows == [(EPOCHS - 1,)]
