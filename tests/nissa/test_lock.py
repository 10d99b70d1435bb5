from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from esper.nissa.database import StoreError
from esper.nissa.lock import WriterLock, is_locked


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    first, second = WriterLock(path), WriterLock(path)
    first.acquire()
    assert is_locked(path)
    with pytest.raises(StoreError, match=rf"process {os.getpid()}\); wait for it"):
        second.acquire()
    first.release()
    first.release()
    assert not is_locked(path)
    second.acquire()
    second.release()


def test_the_lock_goes_with_its_process_however_it_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from esper.nissa.lock import WriterLock\n"
        "WriterLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "lock"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert is_locked(path)
    with pytest.raises(StoreError, match=f"process {child.pid}"):
        WriterLock(path).acquire()
    child.kill()
    child.wait()
    child.stdout.close()
    assert not is_locked(path)


def test_somebody_who_only_looks_is_waited_for(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [looking]).start()
    started = time.monotonic()
    lock = WriterLock(path)
    lock.acquire()
    lock.release()
    assert time.monotonic() - started < 5


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write to .*: No such file"):
        WriterLock(tmp_path / "missing" / "lock").acquire()
