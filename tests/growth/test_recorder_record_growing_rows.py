from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from esper.growth.recorder import EpochRows
from esper.leyline.records import EpochRecord
from esper.nissa.columns import Row
from esper.nissa.schema import (
    ContributionRow,
    DecisionRow,
    EpochRow,
    EventKind,
    EventRow,
    SeedRow,
    StageRow,
)
from tests.nissa.telling import HISTORY


def epoch_rows(history: Sequence[EpochRecord], ablate_every: int = 1, **columns: int) -> list[Row]:
    """The rows of the last epoch."""
    rows = EpochRows(history[:-1], host_parameters=6_418, ablate_every=ablate_every)
    return rows.of(history[-1], **columns)


def test_a_quiet_epoch_is_one_row_and_its_decision() -> None:
    rows = epoch_rows(HISTORY[:1], memory_bytes=5)
    assert [type(row) for row in rows] == [DecisionRow, EpochRow]
    epoch = rows[-1]
    assert isinstance(epoch, EpochRow)
    assert (epoch.step, epoch.live_seeds, epoch.memory_bytes) == (1, 0, 5)


def test_an_epoch_tells_everything_and_itself_last() -> None:
    rows = epoch_rows(HISTORY[:11])
    kinds = [type(row) for row in rows]
    assert kinds == [StageRow, ContributionRow, SeedRow, DecisionRow, EventRow, EpochRow]
    stage = rows[0]
    assert isinstance(stage, StageRow)
    assert (stage.stage, stage.entered, stage.ordinal) == ("BLENDING", True, 0)
    assert isinstance(rows[-1], EpochRow)
    assert rows[-1].best_score == max(record.val_score for record in HISTORY[:11])


def test_rows_do_not_depend_on_where_they_were_begun() -> None:
    rows = EpochRows(host_parameters=6_418)
    for count, record in enumerate(HISTORY, start=1):
        assert rows.of(record) == epoch_rows(HISTORY[:count])


def test_only_fresh_measurements_are_contributions() -> None:
    def measured(epoch: int, every: int) -> int:
        rows = epoch_rows(HISTORY[:epoch], ablate_every=every)
        return sum(isinstance(row, ContributionRow) for row in rows)

    assert [measured(epoch, 1) for epoch in (10, 11, 12, 18)] == [0, 1, 1, 1]
    assert [measured(epoch, 5) for epoch in (11, 12, 15, 16)] == [1, 0, 0, 1]
    # A fossil is not measured again.
    assert measured(19, 1) == 0


def test_a_seed_is_told_with_what_became_of_the_score_since_it_germinated() -> None:
    rows = epoch_rows(HISTORY[:12])
    (stage,) = [row for row in rows if isinstance(row, StageRow)]
    (seed,) = [row for row in rows if isinstance(row, SeedRow)]
    germinated = HISTORY[3]
    assert seed.germinated == germinated.epoch
    gained = HISTORY[11].val_score - germinated.val_score
    assert stage.improvement == seed.improvement == pytest.approx(gained)


def test_a_rollback_is_told_with_its_reason() -> None:
    record = dataclasses.replace(HISTORY[1], rollback="divergence")
    rows = epoch_rows([HISTORY[0], record])
    (event,) = [row for row in rows if isinstance(row, EventRow)]
    assert event.kind == EventKind.GOVERNOR_ROLLBACK
    assert "divergence" in str(event.message)
    epoch = rows[-1]
    assert isinstance(epoch, EpochRow)
    assert epoch.rollback_reason == "divergence"
