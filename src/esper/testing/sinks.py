"""The conformance checks of sinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from esper.nissa.columns import TABLES, Row
from esper.nissa.schema import AlarmRow, DecisionRow, EpochRow, EventRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow
from esper.nissa.sinks.sink import Sink, SinkContext
from esper.testing.controllers import require

HOSTILE = "<script>alert(1)</script> '); DROP TABLE runs; -- \x1b[31m\x00 \udcff \u202e"


def check_sink(factory: Callable[[], Sink], folder: Path) -> None:
    """Take a sink through a run and a resume, and raise if it breaks the protocol.

    The checks: it has the four methods; it accepts every kind of record, also empty ones and ones
    with hostile text; its mark is plain data; it resumes from a mark, twice from the same one, and
    without a mark; it closes without a record.

    Args:
        factory: Returns a new sink.
        folder: An empty folder in place of the run folder.

    Raises:
        AssertionError: The sink breaks the protocol; the message says where.
    """
    sink = factory()
    require(
        isinstance(sink, Sink) and not isinstance(sink, type),
        f"{sink!r} must be an object with start, write, mark and close",
    )
    run = RunRow(
        name=HOSTILE, task="digits", controller="wait", epochs=4, run_id="0123abcd", created=1.7e9
    )
    context = partial(SinkContext, folder=folder, run=run)
    sink.start(context(is_resumed=False, cursor=None))
    sink.write([])
    sink.write(sample_records())
    first = _mark(sink)
    sink.write([EpochRow(step=3, val_score=3.0)])
    _mark(sink)
    sink.close("interrupted")
    for attempt in range(2):
        again = factory()
        again.start(context(is_resumed=True, cursor=first))
        again.write([EpochRow(step=3, val_score=float(attempt))])
        again.close("finished")
    restarted = factory()
    restarted.start(context(is_resumed=True, cursor=None))
    restarted.close("failed")


def sample_records() -> list[Row]:
    """Return records of every kind: full, empty, and with hostile text."""
    records: list[Row] = [table.record() for table in TABLES.values()]
    records += [
        EpochRow(step=1, val_loss=0.7, val_score=71.0, train_loss=float("nan"), parameters=100),
        EpochRow(step=2, val_loss=float("inf"), val_score=72.0, twin_score=70.0),
        DecisionRow(step=1, op="GERMINATE", slot=HOSTILE, reason=HOSTILE),
        UpdateHeadRow(head="op", entropy=0.5, ratio_max=1.1, env_steps=600),
        UpdateRow(approx_kl=0.01, clipfrac=0.1, explained_variance=0.5, env_steps=600),
        EpisodeRow(episodic_return=1.5, final_score=80.0, env_steps=600),
        RoundRow(
            return_mean=1.5,
            wait_share_free=0.99,
            env_steps=600,
            reward_terms={HOSTILE: {"mean": 0.5, "share": 1.0}},
        ),
        AlarmRow(step=2, monitor=HOSTILE, severity="critical", message=HOSTILE, advice=HOSTILE),
        EventRow(step=2, kind="note", message=HOSTILE, data={HOSTILE: [1, None, HOSTILE]}),
    ]
    return records


def _mark(sink: Sink) -> dict[str, object]:
    cursor = sink.mark()
    try:
        read_back: dict[str, object] = json.loads(json.dumps(dict(cursor), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"mark() must return plain data, got {cursor!r}: {error}") from error
    require(read_back == dict(cursor), f"mark() must survive JSON, got {cursor!r}")
    return read_back
