from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.errors import UsageError
from esper.nissa import RunRow, StoreError, open_run, open_store, query_run
from esper.nissa.schema import (
    AlarmRow,
    ContributionRow,
    DecisionRow,
    EpochRow,
    EventRow,
    SeedRow,
    StageRow,
)
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow
from tests.nissa.telling import hold_lock, run_row


def rows(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return query_run(folder, sql).rows


def test_what_is_told_is_found_again(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(EpochRow(step=1, val_score=71.5, stabilized=True))
        store.write(
            DecisionRow(step=1, op="GERMINATE", slot="r0c0", alternatives={"op": [["WAIT", 0.4]]})
        )
        store.write(SeedRow(ordinal=0, slot="r0c0", blueprint="norm", fate="germinated"))
        store.write(SeedRow(ordinal=0, slot="r0c0", blueprint="norm", fate="training"))
        store.write(StageRow(step=2, ordinal=0, slot="r0c0", stage="TRAINING", alpha=0.0))
        store.write(ContributionRow(step=2, kind="leave_one_out", slot="r0c0", value=1.5, se=0.2))
        store.write(ContributionRow(step=2, kind="solo_on", slot="r0c0", value=1.0))
        store.write(AlarmRow(step=2, monitor="mine", severity="info", message="look"))
        store.event("note", "hello", step=2, data={"a": [1, None]})
        store.write(RoundRow(round=0, return_mean=1.0))
        store.write(UpdateHeadRow(head="op", entropy=0.5))
        store.write(UpdateRow(approx_kl=0.01))
        store.write(EpisodeRow(episodic_return=3.0, reached_score=False))
        store.finish("finished", val_score=71.5)
    with open_run(tmp_path) as run:
        (epoch,) = run.rows("epochs")
        assert epoch["val_score"] == 71.5
        assert epoch["stabilized"] is True
        assert epoch["train_loss"] is None
        assert run.rows("decisions")[0]["alternatives"] == {"op": [["WAIT", 0.4]]}
        assert [seed["fate"] for seed in run.rows("seeds")] == ["training"]
        assert [(one["ordinal"], one["kind"]) for one in run.rows("contributions")] == [
            (0, "leave_one_out"),
            (1, "solo_on"),
        ]
        assert run.rows("events")[0]["data"] == {"a": [1, None]}
        assert run.rows("alarms")[0]["monitor"] == "mine"
        assert run.rows("episodes")[0]["reached_score"] is False
        assert len(run.rows("seed_stages")) == len(run.rows("rounds")) == 1
        assert len(run.rows("updates")) == len(run.rows("update_heads")) == 1
        info = run.info
    assert (info.status, info.val_score, info.task, info.waits) == ("finished", 71.5, "digits", 0)


def test_absent_is_null_and_never_zero(tmp_path: Path) -> None:
    with open_store(tmp_path, RunRow(), sinks=()) as store:
        store.write(EpochRow(step=1))
        store.write(UpdateRow(round=1, approx_kl=float("nan")))
    (epoch,) = rows(tmp_path, "SELECT * FROM epochs")
    assert epoch.count(None) == len(epoch) - 5  # id, round, row, step, time
    assert rows(tmp_path, "SELECT approx_kl FROM updates") == [(None,)]


def test_rows_are_in_the_file_within_half_a_second(tmp_path: Path) -> None:
    delays = []
    with open_store(tmp_path, run_row(), sinks=()) as store:
        for step in range(1, 4):
            store.write(EpochRow(step=step))
            told = time.monotonic()
            while rows(tmp_path, "SELECT MAX(step) FROM epochs") != [(step,)]:
                assert time.monotonic() - told < 10
            delays.append(time.monotonic() - told)
    # A busy machine gets the benefit of the doubt twice.
    assert min(delays) < 0.5


def test_rows_told_together_are_committed_together(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(EpochRow(step=1), EventRow(kind="note", step=1))
        store.write(EpochRow(step=2), EventRow(kind="note", step=2), EpochRow(step=1))
        with pytest.raises(StoreError, match="epochs row"):
            store.flush()
    assert rows(tmp_path, "SELECT step FROM epochs") == [(1,)]
    assert rows(tmp_path, "SELECT step FROM events") == [(1,)]


def test_many_rows_as_columns(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write_columns(
            "decisions",
            {
                "round": 4,
                "row": list(range(300)),
                "step": 7,
                "op": ["WAIT", "PRUNE", "ADVANCE"] * 100,
                "alternatives": [{"op": []}] * 300,
            },
        )
        store.write_columns("epochs", {"row": [], "step": 1})
    assert rows(tmp_path, "SELECT COUNT(*), MAX(row), MIN(round) FROM decisions") == [(300, 299, 4)]
    assert rows(tmp_path, "SELECT DISTINCT alternatives FROM decisions") == [('{"op": []}',)]


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ("decision", {"step": [1]}, "there is no table 'decision'"),
        ("runs", {"task": ["x"]}, "there is no table 'runs'"),
        ("decisions", {"stp": [1]}, "has no column 'stp'"),
        ("decisions", {"step": [1], "row": [1, 2]}, "lists of one length"),
        ("decisions", {"step": 1}, "lists of one length"),
    ],
)
def test_wrong_columns_are_refused(
    tmp_path: Path, table: str, columns: dict[str, Any], message: str
) -> None:
    with (
        open_store(tmp_path, run_row(), sinks=()) as store,
        pytest.raises(UsageError, match=message),
    ):
        store.write_columns(table, columns)


def test_numbers_of_other_libraries_and_hostile_text_are_kept(tmp_path: Path) -> None:
    import numpy as np
    import torch

    hostile = "'); DROP TABLE runs; -- <b> \x1b[31m \x00 \udcff"
    with open_store(tmp_path, run_row(task=hostile, name=hostile), sinks=()) as store:
        store.write(
            EpochRow(
                step=np.int64(3),
                val_score=torch.tensor(1.5),
                val_loss=np.float32(0.25),
                stabilized=np.bool_(True),
            )
        )
        store.write(DecisionRow(step=1, op=hostile, reason=hostile * 500))
        store.event(hostile, hostile, step=1, data={hostile: Path("a/b")})
    kept = hostile.encode("utf-8", "backslashreplace").decode()
    assert rows(tmp_path, "SELECT step, val_score, val_loss, stabilized FROM epochs") == [
        (3, 1.5, 0.25, 1)
    ]
    assert rows(tmp_path, "SELECT op, reason FROM decisions") == [(kept, kept * 500)]
    assert rows(tmp_path, "SELECT kind, data FROM events")[0][0] == kept
    with open_run(tmp_path) as run:
        assert run.info.task == kept


@pytest.mark.parametrize("value", [object(), 2**70, {"a": 1}])
def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path, value: Any) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(EpochRow(step=2, parameters=value))
        with pytest.raises(StoreError, match=r"the epochs row \(round 0, row 0, step 2\)"):
            store.flush()


def test_a_full_queue_makes_the_producer_wait_and_the_wait_is_measured(tmp_path: Path) -> None:
    holder = hold_lock(tmp_path, run_row())
    store = open_store(tmp_path, run_row(), resume=True, sinks=(), queue_rows=20)
    holder.execute("BEGIN IMMEDIATE")
    threading.Timer(0.5, holder.rollback).start()
    for step in range(60):
        store.write(EpochRow(step=step))
    waited = store.stats
    store.close()
    holder.close()
    assert waited.waits > 0
    assert waited.wait_s > 0.1
    assert rows(tmp_path, "SELECT COUNT(*) FROM epochs") == [(60,)]
    (kept,) = rows(tmp_path, "SELECT waits, wait_s > 0.1 FROM runs")
    assert kept == (waited.waits, 1)


def test_alarms_are_rows_and_reach_whoever_listens(tmp_path: Path) -> None:
    heard: list[AlarmRow] = []
    with open_store(tmp_path, run_row(), sinks=(), on_alarm=heard.append) as store:
        for step in range(1, 6):
            store.write(EpochRow(step=step, val_loss=0.5, val_score=80.0))
        store.write(EpochRow(step=6, val_loss=5.0, val_score=60.0))
        store.write(EpochRow(step=7, val_loss=0.5, val_score=80.0))
    found = rows(tmp_path, "SELECT step, monitor, state, subject FROM alarms ORDER BY id")
    assert found == [
        (6, "sudden_change", "raised", "loss_spike"),
        (6, "sudden_change", "raised", "score_drop"),
        (7, "sudden_change", "cleared", "loss_spike"),
        (7, "sudden_change", "cleared", "score_drop"),
    ]
    assert [(alarm.step, alarm.state) for alarm in heard] == [(s, t) for s, _, t, _ in found]


# -------------------------------------------------------------------------------------- the ends


def test_a_run_that_is_closed_without_a_word_was_interrupted(tmp_path: Path) -> None:
    open_store(tmp_path, run_row(), sinks=()).close()
    assert rows(tmp_path, "SELECT status FROM runs") == [("interrupted",)]


def test_an_exception_is_noted(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        open_store(tmp_path, run_row(), sinks=()),
    ):
        raise RuntimeError("the\nhouse <b>burns</b>")
    assert rows(tmp_path, "SELECT status, note FROM runs") == [
        ("failed", "RuntimeError: the house <b>burns</b>")
    ]


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    store = open_store(tmp_path, run_row(), sinks=())
    store.write(EpochRow(step=1))
    with pytest.raises(KeyboardInterrupt), store:
        raise KeyboardInterrupt
    assert rows(tmp_path, "SELECT status FROM runs") == [("interrupted",)]
    assert rows(tmp_path, "SELECT COUNT(*) FROM epochs") == [(1,)]


def test_wrong_endings_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        with pytest.raises(UsageError, match="finished, interrupted, failed, got 'won'"):
            store.finish("won")
        with pytest.raises(UsageError, match="no column 'scores'"):
            store.finish("finished", scores=1)


def test_a_closed_store_says_so_and_closes_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path, run_row(), sinks=())
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.write(EpochRow(step=1))


# ----------------------------------------------------------------------------------- what fails


def test_a_store_held_by_another_program_is_one_clear_line(tmp_path: Path) -> None:
    holder = hold_lock(tmp_path, run_row())
    store = open_store(tmp_path, run_row(), resume=True, sinks=(), busy_timeout_s=0.2)
    mark = store.watermark()
    holder.execute("BEGIN IMMEDIATE")
    store.write(EpochRow(step=1))
    with pytest.raises(StoreError) as caught:
        store.watermark()
    assert str(caught.value) == (
        f"cannot write the store {tmp_path / 'run.db'}: database is locked; another program holds "
        "it; close that program; the last checkpoint is intact, then continue with resume=True"
    )
    with pytest.raises(StoreError, match="locked"):
        store.write(EpochRow(step=2))
    store.close()
    holder.rollback()
    holder.close()
    with open_store(tmp_path, run_row(), resume=mark, sinks=()) as again:
        again.write(EpochRow(step=1))
    assert rows(tmp_path, "SELECT COUNT(*) FROM epochs") == [(1,)]


def test_a_killed_writer_is_one_clear_line(tmp_path: Path) -> None:
    import ctypes

    store = open_store(tmp_path, run_row(), sinks=())
    store.write(EpochRow(step=1))
    mark = store.watermark()
    thread = store._writer._thread
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )
    # The thread sleeps until there is something to do; then the exception reaches it.
    store.write(EpochRow(step=2))
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(StoreError, match=r"stopped \(SystemExit.*the last checkpoint is intact"):
        store.write(EpochRow(step=3))
    with pytest.raises(StoreError, match="stopped"):
        store.watermark()
    store.close()
    with open_store(tmp_path, run_row(), resume=mark, sinks=()) as again:
        again.write(EpochRow(step=2))
    assert rows(tmp_path, "SELECT step FROM epochs") == [(1,), (2,)]


FULL_DISK = """
import resource, sys
from pathlib import Path
from esper.nissa import RunRow, StoreError, open_store
from esper.nissa.schema import EpochRow

folder = Path(sys.argv[1])
store = open_store(folder, RunRow(task="digits"), sinks=())
store.write(EpochRow(step=1))
mark = store.watermark()
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    for step in range(2, 100_000):
        store.write(EpochRow(step=step))
        store.event("filler", "x" * 500, step=step)
    store.watermark()
except StoreError as error:
    print(error)
store.close()
import json
print(json.dumps(mark))
"""


def test_a_full_disk_is_one_clear_line_and_the_run_continues_later(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    line, mark = done.stdout.splitlines()
    assert line.startswith(f"cannot write the store {folder / 'run.db'}: ")
    assert "the last checkpoint is intact" in line
    with open_store(folder, RunRow(task="digits"), resume=json.loads(mark), sinks=()) as store:
        store.write(EpochRow(step=2))
    assert rows(folder, "SELECT step FROM epochs") == [(1,), (2,)]
    assert rows(folder, "PRAGMA integrity_check") == [("ok",)]


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.flush()
        child = os.fork()
        if child == 0:
            try:
                store.write(EpochRow(step=1))
                os._exit(1)
            except StoreError as error:
                store.close()
                os._exit(0 if "forked" in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.write(EpochRow(step=2))
    assert rows(tmp_path, "SELECT step FROM epochs") == [(2,)]


# --------------------------------------------------------------------------------------- SIGKILL


def soak(folder: Path, kills: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.nissa.soak", str(folder), str(kills)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_store_survives_sigkill_at_random_moments(tmp_path: Path) -> None:
    assert soak(tmp_path, 5)["kills"] == 5


@pytest.mark.slow
def test_a_store_survives_sigkill_at_fifty_random_moments(tmp_path: Path) -> None:
    assert soak(tmp_path, 50)["kills"] == 50


def test_a_process_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from esper.nissa import RunRow, open_store\n"
        "from esper.nissa.schema import EpochRow\n"
        "store = open_store(sys.argv[1], RunRow(), sinks=())\n"
        "store.write(EpochRow(step=1))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert rows(tmp_path, "SELECT COUNT(*) FROM epochs") == [(1,)]
    assert rows(tmp_path, "SELECT status FROM runs") == [("interrupted",)]
