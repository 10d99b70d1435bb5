from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from esper.growth.recorder import EpochRows
from esper.leyline.errors import CheckpointError, EsperError
from esper.leyline.records import EpochRecord
from esper.nissa import EventKind, RunRow, RunStore, StoreError, open_run, open_store
from esper.nissa.reader import read_history
from esper.nissa.report import read_modules, render_run, report_run
from esper.nissa.schema import AlarmRow, ContributionRow
from tests.nissa.report.runs import COMMAND, CONFIG, HOST_PARAMETERS, SLOTS, VERSIONS, growing_run
from tests.nissa.report.test_growing import HOSTILE, read
from tests.nissa.report.test_picture_architecture import part

ROW = RunRow(
    task="digits",
    controller="heuristic",
    seed=7,
    epochs=60,
    slots=list(SLOTS),
    host_parameters=HOST_PARAMETERS,
    config=CONFIG,
    command=COMMAND,
    versions=VERSIONS,
)


def tell(store: RunStore, history: list[EpochRecord], epochs: int) -> None:
    modules = [part(f"blocks.{number}", name).to_mapping() for number, name in enumerate(SLOTS)]
    store.event(EventKind.TRAINING_STARTED, data={"modules": modules})
    rows = EpochRows(host_parameters=HOST_PARAMETERS)
    for record in history[:epochs]:
        store.write(*rows.of(record))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    with open_store(tmp_path / "run", ROW, sinks=()) as store:
        tell(store, growing_run(), 60)
        store.write(ContributionRow(step=60, kind="leave_one_out", slot="r0c1", value=1.25, se=0.5))
        store.finish("finished", val_score=96.5, twin_val_score=95.0, parameters=6020)
    return tmp_path / "run"


def test_a_report_is_not_written_through_a_link(finished: Path, tmp_path: Path) -> None:
    precious = tmp_path / "bashrc"
    precious.write_text("precious")
    (finished / "report.html").symlink_to(precious)
    with pytest.raises(CheckpointError, match="it is a link to"):
        report_run(finished)
    assert precious.read_text() == "precious"


def test_a_finished_run_is_told_from_its_store(finished: Path) -> None:
    path = report_run(finished)
    assert path == finished / "report.html"
    page = path.read_text(encoding="utf-8")
    reader = read(page)
    for text in (
        *("digits: a grown network", "+1.50 points", COMMAND, "2.13.0", "+1.25 ± 0.50"),
        *("finished", "Architecture", "blocks.1", "r0c1: conv_light", "r0c2: empty"),
    ):
        assert text in reader.text
    assert reader.count("svg") == 2
    assert reader.count("desc") == 2


def test_the_report_can_go_elsewhere(finished: Path, tmp_path: Path) -> None:
    assert report_run(finished / "run.db", tmp_path / "x.html") == tmp_path / "x.html"
    assert not (finished / "report.html").exists()
    with pytest.raises(CheckpointError, match="cannot save"):
        report_run(finished, tmp_path / "x.html" / "y.html")


def test_a_run_that_goes_on_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", ROW, sinks=()) as store:
        store.flush()
        assert "No epochs were recorded" in report_run(tmp_path / "run").read_text()
        tell(store, growing_run(), 30)
        store.flush()
        text = read(report_run(tmp_path / "run").read_text()).text
    assert "Written after epoch 30 of 60; the run continues." in text
    assert "A growing run on digits, not yet at its end" in text
    assert "the controller heuristic" in text
    text = read(report_run(tmp_path / "run").read_text()).text
    assert "Written after epoch 30 of 60; the run stopped there." in text


def test_alarms_are_rows_with_their_advice(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", ROW, sinks=()) as store:
        tell(store, growing_run(), 3)
        store.write(
            AlarmRow(
                step=2, monitor="own", severity="warning", message=HOSTILE, advice="Try less of it."
            )
        )
        store.finish("failed", note=HOSTILE)
    page = report_run(tmp_path / "run").read_text(encoding="utf-8")
    reader = read(page)
    assert "Try less of it." in reader.text
    assert reader.count("img") == 0
    assert "\x07" not in page


def test_training_has_a_page_of_its_own_that_stays_small(tmp_path: Path) -> None:
    row = RunRow(kind="train", task="digits", rounds=50, command="esper train")
    with open_store(tmp_path / "run", row, sinks=(), watch=False) as store:
        for number in range(20):
            store.write_columns(
                "decisions",
                {"round": number, "row": list(range(500)), "step": 1, "op": ["WAIT"] * 500},
            )
    page = report_run(tmp_path / "run").read_text()
    assert "A controller trained on digits" in page
    assert "10,000" in page
    assert len(page) < 100_000


def test_a_host_that_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", ROW, sinks=()) as store:
        store.write(*EpochRows().of(growing_run()[0]))
    with open_run(tmp_path / "run") as run:
        assert read_modules(run) == ()
        assert "Architecture" not in render_run(run)


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        report_run(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET config = '{'",
        "UPDATE runs SET slots = '[' || hex(zeroblob(10)) || ']'",
        "UPDATE runs SET seed = 'seven'",
        "UPDATE epochs SET val_score = 'high'",
        "UPDATE epochs SET step = x'00' WHERE step = 3",
        "UPDATE seed_stages SET slot = x'ff'",
        "UPDATE runs SET versions = replace(hex(zeroblob(50000)), '00', '[')",
        "DELETE FROM runs",
    ],
)
def test_a_store_that_somebody_changed_is_one_line(finished: Path, statement: str) -> None:
    change = sqlite3.connect(finished / "run.db")
    change.execute(statement)
    change.commit()
    change.close()
    with pytest.raises(EsperError) as caught:
        report_run(finished)
    assert "\n" not in str(caught.value)


def test_a_long_run_is_thinned_and_says_so(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.nissa.report.SHOWN_EPOCHS", 25)
    page = report_run(finished).read_text()
    assert "one epoch in 3 is shown" in page
    with open_run(finished) as stored:
        assert [record.epoch for record in read_history(stored, 7)] == [*range(7, 60, 7), 60]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grow", "train"])
def test_a_report_on_a_million_decisions_is_small_and_quick(tmp_path: Path, kind: str) -> None:
    decisions, step = 1_000_000, 50_000
    with open_store(tmp_path / "run", RunRow(kind=kind, slots=["a"]), sinks=(), watch=False) as run:
        for low in range(0, decisions, step):
            numbers = range(low, low + step)
            where = {"step": [number + 1 for number in numbers]}
            if kind == "train":
                where = {
                    "round": [number // 1000 for number in numbers],
                    "row": [number // 500 % 2 for number in numbers],
                    "step": [number % 500 + 1 for number in numbers],
                }
            else:
                run.write_columns("epochs", {**where, "val_score": 50.0, "parameters": 100})
            run.write_columns("decisions", {**where, "op": "WAIT", "outcome": "done"})
    # Not `ru_maxrss`: a process that is forked keeps the highest mark of the one it comes from.
    script = (
        "import re, sys, time; from esper.nissa.report import report_run\n"
        "start = time.process_time(); report_run(sys.argv[1]); print(time.process_time() - start, "
        "re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < 10
    assert kilobytes < 500_000
