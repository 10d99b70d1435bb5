from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError
from esper.nissa import StoreError, open_store, query_run
from esper.nissa.schema import EpochRow
from tests.nissa.telling import hold_lock, run_row


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        with pytest.raises(CheckpointError, match=rf"another process \(process {os.getpid()}\)"):
            open_store(tmp_path, run_row(), resume=True)
        store.write(EpochRow(step=1))
    assert query_run(tmp_path, "SELECT COUNT(*) FROM epochs").rows == [(1,)]


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    open_store(tmp_path, run_row(), sinks=()).close()
    with pytest.raises(StoreError, match="already holds a run; continue it"):
        open_store(tmp_path, run_row(), sinks=())
    open_store(tmp_path, run_row(), resume=True, sinks=()).close()


def test_a_held_store_cannot_be_opened_either(tmp_path: Path) -> None:
    holder = hold_lock(tmp_path, run_row())
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program holds it"):
        open_store(tmp_path, run_row(), resume=True, sinks=(), busy_timeout_s=0.1)
    holder.rollback()
    holder.close()
    open_store(tmp_path, run_row(), resume=True, sinks=()).close()


def test_a_run_waits_minutes_for_whoever_holds_its_store(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row(), sinks=()) as store:
        found = store._writer.call(lambda made: made.execute("PRAGMA busy_timeout").fetchone())
        assert found[0] >= 60_000


READ_ONLY = """
import os, sys
from pathlib import Path
from esper.leyline.errors import CheckpointError
from esper.nissa import RunRow, open_store, query_run

folder = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for target in (folder, folder / "new"):
    try:
        open_store(target, RunRow(), resume=target == folder, sinks=())
    except CheckpointError as error:
        print(error)
print(query_run(folder, "SELECT COUNT(*) FROM epochs").rows)
"""


def test_a_read_only_folder_is_one_clear_line_and_can_still_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with open_store(folder, run_row(), sinks=()) as store:
        store.write(EpochRow(step=1))
    # Whoever is not the owner must be able to get there.
    ways = [path for path in (tmp_path, *tmp_path.parents) if path.stat().st_uid == os.getuid()]
    modes = {path: path.stat().st_mode for path in ways}
    for path, mode in modes.items():
        path.chmod(mode | 0o055)
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        folder.chmod(0o755)
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.returncode == 0, done.stderr
    first, second, count = done.stdout.splitlines()
    assert first == f"cannot write to {folder}: Permission denied; make the folder writable or " + (
        "choose another"
    )
    assert "cannot create the run folder" in second
    assert count == "[(1,)]"


def test_the_log_of_a_store_that_was_moved_away_is_not_replayed(tmp_path: Path) -> None:
    """Its rows came back into the new store, whose own were then refused as there already."""
    first = open_store(tmp_path, run_row(), sinks=())
    first.write(EpochRow(step=1))
    first.flush()
    leftover = {name: (tmp_path / name).read_bytes() for name in ("run.db-wal", "run.db-shm")}
    first.close()
    (tmp_path / "run.db").rename(tmp_path / "elsewhere.db")
    for name, data in leftover.items():
        (tmp_path / name).write_bytes(data)
    with open_store(tmp_path, run_row(), resume=True, sinks=()) as second:
        second.write(EpochRow(step=1), EpochRow(step=2))
        second.flush()
    assert query_run(tmp_path, "SELECT step FROM epochs").rows == [(1,), (2,)]


@pytest.mark.parametrize("what", ["removed", "moved", "moved and made anew", "store removed"])
def test_what_vanishes_is_noticed_at_the_next_checkpoint(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"
    store = open_store(folder, run_row(), sinks=())
    store.write(EpochRow(step=1))
    store.watermark()
    if what == "removed":
        shutil.rmtree(folder)
    elif what == "store removed":
        (folder / "run.db").unlink()
    else:
        folder.rename(tmp_path / "moved")
    if what == "moved and made anew":
        shutil.copytree(tmp_path / "moved", folder)
    store.write(EpochRow(step=2))
    with pytest.raises(StoreError, match=r"was moved or removed .* resume=True"):
        store.watermark()
    store.close()


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_store_behind_a_link_is_not_written(tmp_path: Path, make: Callable[..., None]) -> None:
    open_store(tmp_path / "mine", run_row(), sinks=()).close()
    before = (tmp_path / "mine" / "run.db").read_bytes()
    (tmp_path / "sent").mkdir()
    make(tmp_path / "mine" / "run.db", tmp_path / "sent" / "run.db")
    with pytest.raises(CheckpointError, match=r"it is a link to|\(a hard link\)"):
        open_store(tmp_path / "sent", run_row(), resume=True, sinks=())
    assert (tmp_path / "mine" / "run.db").read_bytes() == before
