"""`esper grow` with its store: resumed, killed, refused by the disk, asked and reported."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.growth.recorded import RecordedGrowth
from esper.leyline.records import EpochRecord
from esper.nissa import store
from esper.nissa.columns import TABLES
from esper.nissa.folder import GROWING, Checkpoints
from esper.nissa.schema import AlarmRow
from esper.scripts.cli import views as grow_view
from esper.scripts.cli.output import alarm_line, safe
from esper.utils.files import WriterLock
from tests.scripts.cli.terminal import Said, start
from tests.scripts.cli.terminal import esper as run_esper

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")

EPOCHS = 16
PLAN = """\
- {epoch: 1, op: germinate, slot: r0c0, blueprint: norm}
- {epoch: 2, op: advance, slot: r0c0}
- {epoch: 13, op: advance, slot: r0c0}
"""
LONG = ("grow", "--task", "digits", "--epochs", 400, "--controller", "random", "--seed", 1)

Command = Callable[..., Said]
Given = tuple[object, ...]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run from an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_esper(capsys, *arguments)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """What starts the run: a seed that lives long enough to be measured."""
    plan = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan.write_text(PLAN)
    return (
        *("grow", "--task", "digits_mlp", "--epochs", EPOCHS, "--seed", 2, "--json"),
        *("--controller", f"schedule:{plan}", "--keep", "last", "--out", "run"),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, arguments: Given) -> Path:
    """The run without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(*arguments, cwd=folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [seed["fate"] for seed in json.loads(out)["seeds"]] == ["blending"]
    return folder / "run"


def lasting(run: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return everything in a store that identical runs have in common."""
    found = {}
    with closing(sqlite3.connect(run / "run.db")) as connection:
        for table in TABLES.values():
            names = [column.name for column in table.columns if not column.is_volatile]
            condition = "WHERE volatile = 0" if "volatile" in names else ""
            listed = ", ".join(f'"{name}"' for name in names)
            for source in {table.name, table.stored_as}:
                found[source] = connection.execute(
                    f'SELECT {listed} FROM "{source}" {condition} ORDER BY id'
                ).fetchall()
    return found


def tb_bytes(run: Path) -> int:
    """Return the length of the curves; the times in them differ."""
    return sum(path.stat().st_size for path in (run / "tb").iterdir())


def assert_sound(run: Path) -> int:
    """Check that a store is whole and every row belongs to an epoch; return the last epoch."""
    with closing(sqlite3.connect(run / "run.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT COUNT(*) FROM runs").fetchone() == (1,)
        steps = [step for (step,) in connection.execute("SELECT step FROM epochs ORDER BY id")]
        assert steps == list(range(1, len(steps) + 1))
        for table in ("decisions", "seed_stages", "contributions", "alarms", "events"):
            strangers = connection.execute(
                f'SELECT COUNT(*) FROM "{table}" WHERE step > 0 AND NOT EXISTS (SELECT 1 FROM '
                f'epochs AS e WHERE (e.round, e.row, e.step) = ("{table}".round, "{table}".row, '
                f'"{table}".step))'
            ).fetchone()
            assert strangers == (0,), table
        decided = connection.execute("SELECT COUNT(*) FROM decisions").fetchone()[0]
        assert decided in (len(steps), len(steps) - 1)
    return len(steps)


# --------------------------------------------------------------------------------------- what is in


def test_a_finished_run_says_everything(whole: Path, arguments: Given, command: Command) -> None:
    assert assert_sound(whole) == EPOCHS
    with esper.open_run(whole) as run:
        info = run.info
        assert info.status == "finished"
        assert (info.task, info.seed) == ("digits_mlp", 2)
        assert info.controller == arguments[arguments.index("--controller") + 1]
        assert info.command == "esper " + " ".join(map(str, arguments))
        assert isinstance(info.versions, dict)
        assert "torch" in info.versions
        assert isinstance(info.config, dict)
        assert info.config["growth"]["epochs"] == EPOCHS
        kinds = {row["kind"] for row in run.rows("contributions", where=f"step = {EPOCHS}")}
        events = [row["kind"] for row in run.rows("events")]
    assert "all_off" in kinds
    assert events[0] == "training_started"
    assert tb_bytes(whole) > 0
    document = json.loads((whole / "summary.json").read_text())
    assert (info.val_score, info.test_score) == (document["val_score"], document["test_score"])


def test_runs_and_query_answer_about_it(whole: Path, command: Command) -> None:
    listed = json.loads(command("runs", "--root", whole.parent, "--json").out)["runs"]
    assert [(run["state"], run["done"], run["planned"]) for run in listed] == [
        ("finished", EPOCHS, EPOCHS)
    ]
    said = command("query", whole, "SELECT step, val_score FROM epochs ORDER BY step", "--json")
    rows = json.loads(said.out)["rows"]
    assert [row["step"] for row in rows] == list(range(1, EPOCHS + 1))
    said = command("query", whole, "SELECT op, COUNT(*) FROM decisions GROUP BY op")
    assert said.code == 0
    assert "WAIT" in said.out
    assert command("query", whole, "DELETE FROM epochs").code == 2


# ----------------------------------------------------------------------------------------- resuming


def stopping(after: int, action: Callable[[], None]) -> Callable[..., None]:
    """Return a view that does something after an epoch."""
    shown = grow_view.GrowthView.show

    def show(self: Any, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        shown(self, record, reasons)
        if record.epoch == after:
            action()

    return show


@pytest.mark.parametrize("times", [1, 2])
def test_a_resumed_run_leaves_the_store_of_an_uninterrupted_one(
    times: int, whole: Path, arguments: Given, command: Command, tmp_path: Path
) -> None:
    for number in range(times):
        with pytest.MonkeyPatch.context() as patch:
            show = stopping(3 + 2 * number, lambda: signal.raise_signal(signal.SIGINT))
            patch.setattr(grow_view.GrowthView, "show", show)
            assert command(*arguments).code == 130
        with esper.open_run("run") as run:
            assert run.info.status == "interrupted"
        assert command("report", "run").code == 0
        assert "The network scores" in Path("run/report.html").read_text()
        arguments = ("grow", "--resume", "--out", "run", "--json")
    said = command(*arguments)
    assert said.code == 0, said.err
    assert lasting(tmp_path / "run") == lasting(whole)
    assert tb_bytes(tmp_path / "run") == tb_bytes(whole)
    page = Path("run/report.html").read_text()
    assert "esper grow --task digits_mlp" in page
    assert "--resume" not in page


def test_rows_beyond_the_checkpoint_are_taken_back(
    whole: Path, arguments: Given, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One checkpoint after the first epoch, then a stop that saves nothing.
    monkeypatch.setattr(
        RecordedGrowth, "is_due", lambda self, step: not self.checkpoints.latest.exists()
    )
    with pytest.MonkeyPatch.context() as patch:

        def stop() -> None:
            raise KeyboardInterrupt

        patch.setattr(grow_view.GrowthView, "show", stopping(5, stop))
        assert command(*arguments).code == 130
    assert assert_sound(tmp_path / "run") == 5
    assert command("grow", "--resume", "--out", "run").code == 0
    assert lasting(tmp_path / "run") == lasting(whole)
    assert tb_bytes(tmp_path / "run") == tb_bytes(whole)


def test_a_store_that_was_lost_is_written_anew_from_the_checkpoint(
    whole: Path, arguments: Given, command: Command, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        show = stopping(4, lambda: signal.raise_signal(signal.SIGINT))
        patch.setattr(grow_view.GrowthView, "show", show)
        assert command(*arguments).code == 130
    for path in (tmp_path / "run").glob("run.db*"):
        path.unlink()
    assert command("grow", "--resume", "--out", "run").code == 0
    assert lasting(tmp_path / "run") == lasting(whole)


def test_a_run_that_is_going_on_is_neither_resumed_nor_replaced(
    arguments: Given, command: Command, tmp_path: Path
) -> None:
    assert command(*arguments).code == 0
    lock = WriterLock(tmp_path / "run" / "run.db.lock")
    lock.acquire()
    try:
        resumed = command("grow", "--resume", "--out", "run")
        assert resumed.code == 1
        assert "is being written by another process" in resumed.err
        replaced = command(*arguments, "--overwrite")
        assert replaced.code == 1
        assert "is being written by another process" in replaced.err
    finally:
        lock.release()
    assert assert_sound(tmp_path / "run") == EPOCHS


# ------------------------------------------------------------------------------------------ killing


def kill_once(run: Path, moments: random.Random, arguments: Sequence[object]) -> None:
    """Kill a run at a random moment and check that only the last second is lost."""
    skipped = len(_logged(run))
    process = start(*arguments)
    # A moment counts from the first sign of life: most of a short run is its start.
    seen: dict[int, float] = {}
    begun = None
    limit = time.monotonic() + 60
    span = moments.uniform(0.0, 2.5)
    while begun is None or time.monotonic() - begun < span:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the run makes no progress"
        if (run / "run.db").exists() and begun is None:
            begun = time.monotonic()
        for epoch in _logged(run)[skipped:]:
            seen.setdefault(epoch, time.monotonic())
        time.sleep(0.005)
    process.kill()
    killed = time.monotonic()
    process.communicate()
    kept = assert_sound(run)
    assert all(epoch <= kept for epoch, at in seen.items() if killed - at > 1.0)


def _logged(run: Path) -> list[int]:
    """Return the epochs in the log; one that was trained twice is there twice."""
    try:
        lines = (run / "log.txt").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    words = [line.split() for line in lines]
    return [int(line[2]) for line in words if line[1:2] == ["epoch"] and len(line) > 3]


def kill_often(run: Path, times: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    moments = random.Random(seed)
    arguments: Sequence[object] = (*LONG, "--out", run)
    for _ in range(times):
        kill_once(run, moments, arguments)
        said = run_esper(capsys, "report", run)
        assert said.code == 0, said.err
        assert (run / "report.html").stat().st_size < 5_000_000
        listed = json.loads(run_esper(capsys, "runs", "--root", run, "--json").out)["runs"]
        assert [entry["state"] for entry in listed] == ["interrupted"]
        arguments = ("grow", "--resume", "--out", run)


@pytest.mark.slow
def test_a_store_survives_being_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kill_often(tmp_path / "run", 5, time.time_ns(), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_store_survives_being_killed_often(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_often(tmp_path / "run", 10, seed, capsys)


# ------------------------------------------------------------------------------------------ failing


def _fill_up(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA max_page_count = 1")


def _protect(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")


@pytest.mark.parametrize(
    ("fault", "words"),
    [(_fill_up, "database or disk is full; free some space"), (_protect, "readonly database")],
    ids=["full", "read-only"],
)
def test_a_disk_that_refuses_ends_the_run_with_one_line(
    fault: Callable[[sqlite3.Connection], None],
    words: str,
    whole: Path,
    arguments: Given,
    command: Command,
    tmp_path: Path,
) -> None:
    started = store.RunStore.start
    stores: list[store.RunStore] = []

    def start_store(self: store.RunStore, *arguments: Any) -> None:
        stores.append(self)
        started(self, *arguments)

    def refuse() -> None:
        stores[0]._writer.call(fault)
        stores[0].event("note", "x" * 50_000, volatile=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.RunStore, "start", start_store)
        patch.setattr(grow_view.GrowthView, "show", stopping(3, refuse))
        said = command(*arguments)
    assert_stopped(said, words)
    assert_goes_on(command, tmp_path / "run", whole)


def test_a_store_that_another_program_holds_ends_the_run_with_one_line(
    whole: Path, arguments: Given, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run waits two minutes for others; this test does not.
    monkeypatch.setitem(store.open_store.__kwdefaults__, "busy_timeout_s", 0.1)
    holders: list[sqlite3.Connection] = []

    def hold() -> None:
        holder = sqlite3.connect(tmp_path / "run" / "run.db", timeout=5, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        holders.append(holder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_view.GrowthView, "show", stopping(3, hold))
        said = command(*arguments)
    assert_stopped(said, "another program holds it; close that program")
    for holder in holders:
        holder.close()
    assert_goes_on(command, tmp_path / "run", whole)


def test_a_writer_that_is_killed_ends_the_run_with_one_line(
    whole: Path, arguments: Given, command: Command, tmp_path: Path
) -> None:
    def kill() -> None:
        (thread,) = [one for one in threading.enumerate() if one.name == "esper-store"]
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow_view.GrowthView, "show", stopping(3, kill))
        said = command(*arguments)
    assert_stopped(said, "the writer of the store")
    assert_goes_on(command, tmp_path / "run", whole)


def assert_stopped(said: Said, words: str) -> None:
    assert said.code == 1, said
    assert said.out == ""
    assert "Traceback" not in said.err
    complaints = [line for line in said.err.splitlines() if line.startswith("esper: ")]
    assert len(complaints) == 1, said.err
    assert words in complaints[0]


def assert_goes_on(command: Command, run: Path, whole: Path) -> None:
    Checkpoints(run, GROWING).load()
    resumed = command("grow", "--resume", "--out", "run", "--json")
    assert resumed.code == 0, resumed.err
    assert lasting(run) == lasting(whole)


def test_a_sink_that_fails_is_an_alarm_and_the_run_goes_on(
    arguments: Given, command: Command
) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def refuse(self: Any, context: Any) -> None:
            raise OSError("no room for curves")

        patch.setattr("esper.nissa.sinks.tensorboard.TensorBoardSink.start", refuse)
        said = command(*arguments)
    assert said.code == 0, said.err
    json.loads(said.out)
    assert "alarm (warning): the sink tensorboard" in said.err
    assert "the sink tensorboard" in Path("run/report.html").read_text()


# -------------------------------------------------------------------------------------------- names

HOSTILE = "\x1b[31m<script>alert(1)</script>'; DROP TABLE epochs; --\u202e"


@pytest.mark.skipif(os.name != "posix", reason="other systems refuse such names")
def test_hostile_names_appear_as_text(command: Command, tmp_path: Path) -> None:
    names = [HOSTILE.replace("/", "|"), os.fsdecode(b"r\xffn"), "w" * 200]
    for name in names:
        said = command(
            *("grow", "--task", "digits_mlp", "--no-twin", "--epochs", 1, "--controller", "wait"),
            *("--out", Path("runs") / name),
        )
        assert said.code == 0, said.err
        said = command("report", Path("runs") / name)
        assert said.code == 0, said.err
        assert "\x1b" not in said.out
        page = (tmp_path / "runs" / name / "report.html").read_text(encoding="utf-8")
        assert "<script" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
    for arguments in (("runs",), ("runs", "--json")):
        said = command(*arguments)
        assert said.code == 0, said.err
        assert "\x1b" not in said.out
        assert "\u202e" not in said.out
    for name in names:
        said = command("query", Path("runs") / name, "SELECT name, command FROM runs")
        assert said.code == 0, said.err
        assert "\x1b" not in said.out
        assert "\u202e" not in said.out
        said = command("query", Path("runs") / name, "SELECT COUNT(*) AS n FROM epochs", "--json")
        assert json.loads(said.out)["rows"] == [{"n": 1}]


def test_an_alarm_is_shown_as_text() -> None:
    alarm = AlarmRow(step=3, monitor="m", severity="warning", message=HOSTILE, advice="Try less.")
    line = safe(alarm_line(alarm)).plain
    assert line.startswith("epoch 3: alarm (warning): ")
    assert line.endswith("Try less.")
    assert line.isprintable()
