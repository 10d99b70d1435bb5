from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.nissa import find_runs, open_store
from esper.nissa.listing import describe_run, describe_store
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RoundRow
from tests.nissa.telling import EPOCHS, kill, run_row, tell


def states(root: Path) -> dict[str, str]:
    return {run.path.name: run.state for run in find_runs(root)}


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    tell(tmp_path / "done", sinks=())
    tell(tmp_path / "stopped", stop_after=7, sinks=())
    tell(tmp_path / "killed", stop_after=7, crash=True, sinks=())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"SQLite format 3\x00 and nothing else")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.db").touch()
    (tmp_path / "not_a_run").mkdir()
    with open_store(tmp_path / "going", run_row(), sinks=()) as store:
        store.write(EpochRow(step=3, val_score=44.0))
        store.flush()
        assert states(tmp_path) == {
            "done": "finished",
            "stopped": "interrupted",
            "killed": "interrupted",
            "broken": "damaged",
            "empty": "damaged",
            "going": "running",
        }
        going = describe_run(tmp_path / "going")
    assert (going.done, going.planned, going.unit, going.val_score) == (3, EPOCHS, "epochs", 44.0)
    done = describe_run(tmp_path / "done")
    assert (done.task, done.controller, done.seed, done.kind) == ("digits", "heuristic", 3, "grow")
    assert (done.done, done.val_score) == (EPOCHS, 90.0)
    assert done.age_s is not None
    assert 0 <= done.age_s < 60
    assert describe_run(tmp_path / "broken").note
    assert "is empty" in str(describe_run(tmp_path / "empty").note)


def test_a_training_run_counts_rounds(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(kind="train", rounds=40), sinks=()) as store:
        store.write(RoundRow(round=0))
        store.write(RoundRow(round=1))
    run = describe_run(tmp_path)
    assert (run.done, run.planned, run.unit) == (2, 40, "rounds")


def test_a_run_that_ends_while_it_is_looked_at_was_not_interrupted(tmp_path: Path) -> None:
    store = open_store(tmp_path, run_row(), sinks=())
    store.write(EpochRow(step=EPOCHS, val_score=44.0))
    store.flush()
    connection = sqlite3.connect(tmp_path / "run.db")

    def end_the_run(statement: str) -> None:
        if "FROM epochs" in statement:
            connection.set_trace_callback(None)
            store.finish("finished", val_score=44.0)
            store.close()

    connection.set_trace_callback(end_the_run)
    assert describe_store(tmp_path, connection).state == "running"
    connection.close()
    assert describe_run(tmp_path).state == "finished"


def test_why_a_run_failed_is_noted(tmp_path: Path) -> None:
    store = open_store(tmp_path, run_row(), sinks=())
    with pytest.raises(ValueError, match="too hot"), store:
        raise ValueError("too hot")
    run = describe_run(tmp_path)
    assert (run.state, run.note) == ("interrupted", "ValueError: too hot")


def test_stores_of_others_are_damaged_with_the_reason(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("CREATE TABLE runs (x)")
    connection.commit()
    connection.close()
    run = describe_run(tmp_path)
    assert run.state == "damaged"
    assert "is not an Esper store" in str(run.note)


def test_runs_are_found_at_any_reasonable_depth_and_newest_first(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e", "x/y/z/deep"):
        open_store(tmp_path / name, run_row(), sinks=()).close()
    # A run inside a run folder is part of it, and hidden folders are nobody's business.
    open_store(tmp_path / "a" / "inner", run_row(), sinks=()).close()
    open_store(tmp_path / ".hidden", run_row(), sinks=()).close()
    (tmp_path / "loop").symlink_to(tmp_path)
    for age, name in enumerate(("b/d/e", "a", "b/c", "x/y/z/deep")):
        for path in (tmp_path / name).iterdir():
            if path.is_file():
                os.utime(path, (1e9 - age, 1e9 - age))
    found = [str(run.path.relative_to(tmp_path)) for run in find_runs(tmp_path)]
    assert found == ["b/d/e", "a", "b/c", "x/y/z/deep"]
    assert [run.path for run in find_runs(tmp_path / "b" / "c")] == [tmp_path / "b" / "c"]


def test_a_run_from_before_its_store_is_listed_from_its_settings(tmp_path: Path) -> None:
    for name in ("old", "older"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(
            "task: digits\ncontroller: wait\ngrowth:\n  epochs: 60\n  seed: 4\n"
        )
    (tmp_path / "older" / "summary.json").write_text("{}")
    runs = {run.path.name: run for run in find_runs(tmp_path)}
    assert runs["old"].state == "interrupted"
    assert runs["older"].state == "finished"
    assert (runs["old"].task, runs["old"].controller, runs["old"].planned) == ("digits", "wait", 60)
    (tmp_path / "old" / "config.yaml").write_text("- {[")
    assert describe_run(tmp_path / "old").task is None
    (tmp_path / "old" / "config.yaml").write_text("task: [1]\ngrowth: no\n")
    assert describe_run(tmp_path / "old").task is None


def test_searches_clones_and_proofs_are_told_from_runs(tmp_path: Path) -> None:
    for name, command in (("search", "search"), ("clone", "clone"), ("proof", "prove")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db.lock").touch()
        settings = f"command: {command}\nmembers: {{family: digits_family}}\nrounds: 2\n"
        (tmp_path / name / "config.yaml").write_text(f"{settings}arms: [mine, wait]\n")
    assert states(tmp_path) == dict.fromkeys(("search", "clone", "proof"), "interrupted")
    (tmp_path / "search" / "summary.json").write_text("{}")
    (tmp_path / "proof" / "report.md").write_text("# Proof")
    (tmp_path / "clone" / "clone.json").write_text('{"rounds": [{}]}')
    runs = {run.path.name: run for run in find_runs(tmp_path)}
    assert {name: run.state for name, run in runs.items()} == {
        "search": "finished",
        "proof": "finished",
        "clone": "interrupted",
    }
    assert (runs["clone"].done, runs["clone"].planned, runs["clone"].kind) == (1, 2, "clone")
    proof = runs["proof"]
    assert (proof.task, proof.controller, proof.note) == (
        "digits_family",
        "mine",
        "esper prove: report.md",
    )
    (tmp_path / "clone" / "clone.json").write_text('{"rounds": [{}, {}]}')
    assert describe_run(tmp_path / "clone").state == "finished"
    (tmp_path / "clone" / "clone.json").write_text("[")
    (tmp_path / "clone" / "config.yaml").write_text("command: clone\nmembers: 3\narms: no\n")
    assert describe_run(tmp_path / "clone").state == "interrupted"


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        find_runs(tmp_path / "nowhere")
    assert find_runs(tmp_path) == []


def test_looking_leaves_a_run_as_it_is(tmp_path: Path) -> None:
    tell(tmp_path / "run", stop_after=3, sinks=())
    os.utime(tmp_path / "run" / "run.db", (1e9, 1e9))
    before = (tmp_path / "run" / "run.db").read_bytes()
    first = describe_run(tmp_path / "run")
    assert first.age_s is not None
    assert first.age_s > 1e8
    assert describe_run(tmp_path / "run").age_s == pytest.approx(first.age_s, abs=60)
    assert (tmp_path / "run" / "run.db").read_bytes() == before


def test_names_of_any_bytes_are_listed(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m<b>"))
    tell(folder, stop_after=2, sinks=())
    (run,) = find_runs(tmp_path)
    assert (run.path, run.state) == (folder, "interrupted")


def test_a_run_in_another_process_is_running(tmp_path: Path) -> None:
    script = (
        "import sys; from esper.nissa import RunRow, open_store\n"
        "store = open_store(sys.argv[1], RunRow(), sinks=()); print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    assert describe_run(tmp_path).state == "running"
    child.kill()
    child.communicate()
    assert describe_run(tmp_path).state == "interrupted"


def test_the_helper_that_kills_leaves_a_running_status(tmp_path: Path) -> None:
    store = open_store(tmp_path, run_row(), sinks=())
    kill(store)
    assert describe_run(tmp_path).state == "interrupted"


# ---------------------------------------------------------------------------------- hostile folders


def test_one_bad_or_private_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    with open_store(tmp_path / "good", run_row(), sinks=()) as store:
        store.finish("finished")
    for name in ("bad yaml", "bomb", "pipe"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "bad yaml" / "config.yaml").write_text("!!int ''")
    (tmp_path / "bomb" / "config.yaml").write_text("9" * 5000)
    os.mkfifo(tmp_path / "pipe" / "config.yaml")
    with open_store(tmp_path / "odd", run_row(), sinks=()) as store:
        store.write(EpochRow(step=1, val_score=1.0))
    for statement in ("UPDATE epochs SET val_score = 'high'", "UPDATE runs SET config = '['"):
        change = sqlite3.connect(tmp_path / "odd" / "run.db")
        change.execute(statement)
        change.commit()
        change.close()
        found = {run.path.name: run for run in find_runs(tmp_path)}
        assert found["good"].state == "finished"
        assert found["odd"].state == "damaged"
        assert found["odd"].note
    assert found["bad yaml"].state == found["bomb"].state == "interrupted"


PRIVATE = """
import os, sys
from esper.nissa.listing import find_runs
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(sorted(run.path.name for run in find_runs(sys.argv[1])))
"""


def test_a_private_folder_is_passed_over(tmp_path: Path) -> None:
    for name in ("mine", "private"):
        with open_store(tmp_path / name, run_row(), sinks=()) as store:
            store.finish("finished")
    ways = [path for path in (tmp_path, *tmp_path.parents) if path.stat().st_uid == os.getuid()]
    modes = {path: path.stat().st_mode for path in ways}
    for path, mode in modes.items():
        path.chmod(mode | 0o055)
    (tmp_path / "private").chmod(0o744)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PRIVATE, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['mine']\n"


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_nothing_outside_the_folder_is_listed(tmp_path: Path) -> None:
    tell(tmp_path / "secret", sinks=())
    (tmp_path / "secret" / "config.yaml").write_text("task: secret\n")
    linked = tmp_path / "runs" / "linked"
    linked.mkdir(parents=True)
    (linked / "run.db").symlink_to(tmp_path / "secret" / "run.db")
    settings = tmp_path / "runs" / "settings"
    (settings / "checkpoints").mkdir(parents=True)
    (settings / "config.yaml").symlink_to(tmp_path / "secret" / "config.yaml")
    found = {entry.path.name: entry for entry in find_runs(tmp_path / "runs")}
    assert found["linked"].state == "damaged"
    assert "is a link" in str(found["linked"].note)
    assert found["settings"].task is None
