from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from esper.nissa import open_store, query_run
from esper.nissa.columns import Row
from esper.nissa.schema import AlarmRow, EpochRow
from esper.nissa.schema_runs import RunRow
from esper.nissa.sinks import SinkContext
from esper.nissa.sinks import sink as module
from esper.nissa.sinks.sink import SinkPump
from tests.nissa.telling import run_row

CONTEXT = SinkContext(folder=Path(), run=RunRow(), is_resumed=False, cursor=None)


class Failing:
    """A sink that raises, or hangs, in one of its methods."""

    def __init__(self, where: str, error: BaseException | None = None) -> None:
        self.where = where
        self.error = error
        self.gate = threading.Event()
        self.calls: list[str] = []

    def _reach(self, where: str) -> None:
        self.calls.append(where)
        if where == self.where:
            if self.error is None:
                self.gate.wait(20)
            else:
                raise self.error

    def start(self, context: SinkContext) -> None:
        self._reach("start")

    def write(self, records: Sequence[Row]) -> None:
        self._reach("write")

    def mark(self) -> Mapping[str, Any]:
        self._reach("mark")
        return {}

    def close(self, status: str) -> None:
        self._reach("close")


@pytest.mark.parametrize("where", ["start", "write", "mark"])
@pytest.mark.parametrize(
    "error", [RuntimeError("out\nof paper"), SystemExit(3), KeyboardInterrupt(), MemoryError()]
)
def test_a_failing_sink_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    heard: list[AlarmRow] = []
    sink = Failing(where, error)
    with open_store(tmp_path, run_row(), sinks=[sink], on_alarm=heard.append) as store:
        for step in range(1, 6):
            store.write(EpochRow(step=step))
            assert store.watermark()["number"] == step
        store.finish("finished")
    assert query_run(tmp_path, "SELECT COUNT(*) FROM epochs").rows == [(5,)]
    alarms = query_run(
        tmp_path, "SELECT monitor, subject, volatile, severity, message FROM alarms"
    ).rows
    assert len(alarms) == len(heard) == 1
    assert alarms[0][:4] == ("sink_failed", "Failing", 1, "warning")
    assert type(error).__name__ in alarms[0][4]
    assert "\n" not in alarms[0][4]
    assert sink.calls.count(where) == 1


def test_a_sink_that_fails_at_the_very_end_harms_nothing(tmp_path: Path) -> None:
    sink = Failing("close", RuntimeError("late"))
    with open_store(tmp_path, run_row(), sinks=[sink]) as store:
        store.write(EpochRow(step=1))
        store.finish("finished")
    assert query_run(tmp_path, "SELECT status FROM runs").rows == [("finished",)]
    assert query_run(tmp_path, "SELECT COUNT(*) FROM alarms").rows == [(1,)]


def test_one_failing_sink_does_not_touch_another(tmp_path: Path) -> None:
    good = Failing("never")
    with open_store(tmp_path, run_row(), sinks=[Failing("write", ValueError()), good]) as store:
        for step in range(5):
            store.write(EpochRow(step=step))
            store.flush()
    assert good.calls.count("write") >= 1
    assert good.calls[-1] == "close"


def test_a_hanging_sink_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, str]] = []
    for where, act in (
        ("start", lambda pump: pump.mark(0.2)),
        ("mark", lambda pump: pump.mark(0.2)),
        ("close", lambda pump: pump.close("finished", 0.2)),
    ):
        sink = Failing(where)
        pump = SinkPump(where, sink, CONTEXT, lambda name, why: reports.append((name, why)))
        started = time.monotonic()
        act(pump)
        # Whoever was waited for once is not waited for again.
        for _ in range(50):
            pump.offer([EpochRow(step=1)])
            assert pump.mark(5.0) is None
        assert time.monotonic() - started < 5
        sink.gate.set()
    assert [name for name, _ in reports] == ["start", "mark", "close"]
    assert "did not answer within 0.2 s" in reports[0][1]
    assert "did not end within 0.2 s" in reports[2][1]


def test_a_sink_that_was_late_answers_again_and_keeps_its_last_cursor_meanwhile() -> None:
    reports: list[str] = []
    context = SinkContext(folder=Path(), run=RunRow(), is_resumed=True, cursor={"at": "before"})
    sink = Failing("mark")
    pump = SinkPump("late", sink, context, lambda name, why: reports.append(why))
    assert pump.mark(0.1) == {"at": "before"}
    assert pump.mark(5.0) == {"at": "before"}
    sink.where = "never"
    sink.gate.set()
    deadline = time.monotonic() + 5
    while pump.mark(1.0) != {}:
        assert time.monotonic() < deadline
    assert pump.mark() == {}
    pump.close("finished")
    assert reports == ["it did not answer within 0.1 s"]


def test_a_slow_sink_loses_points_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_RECORDS", 10)
    reports: list[tuple[str, str]] = []
    sink = Failing("start")
    pump = SinkPump("slow", sink, CONTEXT, lambda name, why: reports.append((name, why)))
    for step in range(30):
        pump.offer([EpochRow(step=step)])
    assert pump.dropped == 20
    sink.gate.set()
    pump.close("finished")
    assert len(reports) == 1
    assert "too slow" in reports[0][1]
