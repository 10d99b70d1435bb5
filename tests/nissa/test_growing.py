from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from esper.leyline.records import seed_records
from esper.nissa import open_run, query_run, read_history
from esper.nissa.growing import epoch_rows
from esper.nissa.schema import ContributionRow, DecisionRow, EpochRow, EventRow, SeedRow, StageRow
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


def test_a_quiet_epoch_is_one_row_and_its_decision() -> None:
    rows = epoch_rows(HISTORY[:1], host_parameters=6_418, grad_norm=0.5)
    assert [type(row) for row in rows] == [DecisionRow, EpochRow]
    epoch = rows[-1]
    assert isinstance(epoch, EpochRow)
    assert (epoch.step, epoch.live_seeds, epoch.grad_norm) == (1, 0, 0.5)


def test_an_epoch_tells_everything_and_itself_last() -> None:
    rows = epoch_rows(HISTORY[:11])
    kinds = [type(row) for row in rows]
    assert kinds == [StageRow, ContributionRow, SeedRow, DecisionRow, EventRow, EpochRow]
    stage = rows[0]
    assert isinstance(stage, StageRow)
    assert (stage.stage, stage.entered, stage.ordinal) == ("BLENDING", True, 0)
    assert isinstance(rows[-1], EpochRow)
    assert rows[-1].best_score == max(record.val_score for record in HISTORY[:11])


def test_only_fresh_measurements_are_contributions() -> None:
    def measured(epoch: int, every: int) -> int:
        rows = epoch_rows(HISTORY[:epoch], ablate_every=every)
        return sum(isinstance(row, ContributionRow) for row in rows)

    assert [measured(epoch, 1) for epoch in (10, 11, 12, 18)] == [0, 1, 1, 1]
    assert [measured(epoch, 5) for epoch in (11, 12, 15, 16)] == [1, 0, 0, 1]
    # A fossil is not measured again.
    assert measured(19, 1) == 0


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
