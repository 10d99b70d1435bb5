from __future__ import annotations

from esper.nissa.monitors.recent import WINDOW, Recent
from esper.nissa.schema import (
    DecisionRow,
    EpochRow,
    RoundRow,
    RunRow,
    StageRow,
    UpdateHeadRow,
    UpdateRow,
)


def test_only_the_end_of_an_update_counts() -> None:
    recent = Recent()
    for ordinal in range(3):
        recent.add(UpdateHeadRow(round=0, ordinal=ordinal, head="op", entropy=float(ordinal)))
        recent.add(UpdateRow(round=0, ordinal=ordinal, is_last=ordinal == 2))
    recent.add(UpdateHeadRow(round=1, head="op", entropy=9.0))
    assert [row.ordinal for row in recent.updates] == [2]
    assert [row.entropy for row in recent.heads["op"]] == [2.0, 9.0]


def test_slots_are_those_of_the_last_epoch() -> None:
    recent = Recent()
    recent.add(StageRow(step=1, slot="a"))
    recent.add(StageRow(step=1, slot="b"))
    assert set(recent.stages) == {"a", "b"}
    recent.add(StageRow(step=2, slot="b"))
    assert set(recent.stages) == {"b"}
    recent.add(StageRow(round=1, step=2, slot="c"))
    assert set(recent.stages) == {"c"}


def test_the_window_is_bounded() -> None:
    recent = Recent()
    for step in range(WINDOW + 10):
        recent.add(EpochRow(step=step))
        recent.add(DecisionRow(step=step))
    assert len(recent.epochs) == WINDOW
    assert recent.epochs[0].step == 10


def test_progress_is_the_share_of_rounds() -> None:
    assert Recent().progress is None
    recent = Recent(RunRow(rounds=10))
    assert recent.progress is None
    recent.add(RoundRow(round=0))
    assert recent.progress == 0.1
    recent.add(UpdateRow(round=4))
    assert recent.progress == 0.5
