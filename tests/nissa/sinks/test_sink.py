from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.errors import UnknownNameError, UsageError
from esper.nissa import open_store, register_sink
from esper.nissa.columns import Row
from esper.nissa.schema import EpochRow
from esper.nissa.sinks import SINKS, SinkContext
from esper.nissa.sinks.sink import make_sink
from tests.nissa.telling import run_row


class Remembering:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.context: SinkContext | None = None
        self.records: list[Row] = []
        self.status: str | None = None

    def start(self, context: SinkContext) -> None:
        self.context = context

    def write(self, records: Sequence[Row]) -> None:
        self.records += records

    def mark(self) -> Mapping[str, Any]:
        return {"count": len(self.records)}

    def close(self, status: str) -> None:
        self.status = status


def test_the_built_in_sinks_are_there() -> None:
    assert {"tensorboard", "wandb"} <= set(SINKS.names())


def test_a_third_party_adds_a_sink_by_one_decorator(tmp_path: Path) -> None:
    made: list[Remembering] = []

    @register_sink("remembering")
    def make() -> Remembering:
        made.append(Remembering())
        return made[-1]

    try:
        with open_store(tmp_path, run_row(), sinks=["remembering"]) as store:
            store.write(EpochRow(step=1, val_score=3.0))
            mark = store.watermark()
            store.write(EpochRow(step=2))
            store.finish("finished")
    finally:
        SINKS.unregister("remembering")
    (sink,) = made
    assert sink.context is not None
    assert (sink.context.folder, sink.context.is_resumed) == (tmp_path, False)
    assert sink.context.run.run_id
    assert [row.step for row in sink.records if isinstance(row, EpochRow)] == [1, 2]
    assert sink.status == "finished"
    assert mark["sinks"] == {"remembering": {"count": 1}}


def test_a_resumed_sink_gets_its_cursor_back(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=[Remembering()]) as store:
        store.write(EpochRow(step=1))
        mark = store.watermark()
    again = Remembering()
    open_store(tmp_path, run_row(), resume=mark, sinks=[again]).close()
    assert again.context is not None
    assert (again.context.is_resumed, again.context.cursor) == (True, {"count": 1})
    assert again.status == "interrupted"


def test_names_and_objects_that_are_no_sinks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown sink 'tensorbord', did you mean"):
        make_sink("tensorbord")
    for wrong in (3, Remembering, object()):
        with pytest.raises(UsageError, match="a sink is a name"):
            make_sink(wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown sink 'nope'"):
        open_store(tmp_path, run_row(), sinks=["nope"])
    # The refusal comes before anything is opened.
    assert list(tmp_path.iterdir()) == []
