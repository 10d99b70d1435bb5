from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import lock_descriptor

from esper.leyline.errors import CheckpointError
from esper.utils.files import WriterLock, is_locked


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    first, second = WriterLock(path), WriterLock(path)
    first.acquire()
    assert is_locked(path)
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()}\); wait for it"):
        second.acquire()
    first.release()
    first.release()
    assert not is_locked(path)
    second.acquire()
    second.release()


def test_the_lock_goes_with_its_process_however_it_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from esper.utils.files import WriterLock\n"
        "WriterLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "lock"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert is_locked(path)
    with pytest.raises(CheckpointError, match=f"process {child.pid}"):
        WriterLock(path).acquire()
    child.kill()
    child.wait()
    child.stdout.close()
    assert not is_locked(path)


def test_somebody_who_only_looks_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    assert lock_descriptor(looking, blocking=False)
    threading.Timer(0.1, os.close, [looking]).start()
    started = time.monotonic()
    lock = WriterLock(path)
    lock.acquire()
    lock.release()
    assert time.monotonic() - started < 5


def test_many_may_look_at_once_and_none_takes_another_for_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.extend(is_locked(path) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert not any(found)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "missing" / "lock")
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "pipe")
    assert not is_locked(tmp_path / "pipe")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write to .*: (Not a directory|File exists)"):
        WriterLock(tmp_path / "file" / "lock").acquire()


def test_a_child_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A loader's worker that outlives the run would keep it from being continued."""
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from esper.utils.files import WriterLock\n"
        "WriterLock(Path(sys.argv[1])).acquire()\n"
        "if os.fork() == 0: time.sleep(20)\n"
        "print('held', flush=True); os._exit(0)\n"
    )
    path = tmp_path / "lock"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, stdout=subprocess.DEVNULL)
    assert not is_locked(path)


def test_a_lock_knows_whether_it_still_guards_its_name(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "run" / "lock")
    assert not lock.is_in_place
    lock.acquire()
    assert lock.is_in_place
    (tmp_path / "run").rename(tmp_path / "moved")
    assert not lock.is_in_place
    other = WriterLock(tmp_path / "run" / "lock")
    other.acquire()
    assert other.is_in_place
    assert not lock.is_in_place
    other.release()
    lock.release()
    assert not lock.is_in_place
