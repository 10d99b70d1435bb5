"""Kills a process that writes a store, at random moments, and looks at what is left each time.

    python -m tests.nissa.soak FOLDER KILLS [SEED]

The child numbers its rows and tells its parent of each one; a row carries a checksum of itself.
After every kill the store must open, every row must be whole, none may be missing in between, and
those told a second before the kill must be there. Then the child goes on from its last watermark.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from esper.nissa import RunRow, open_run, open_store
from esper.nissa.schema import DecisionRow, EpochRow

LOST_AT_MOST_S = 1.0


def checksum(step: int) -> str:
    return hashlib.sha256(str(step).encode()).hexdigest()


def write_forever(folder: Path, resume: Any, start: int, out: int) -> None:
    store = open_store(folder, RunRow(task="soak", slots=["a"]), resume=resume)
    step = start
    while True:
        step += 1
        store.write(
            EpochRow(step=step, val_score=float(step), val_loss=1.0),
            DecisionRow(step=step, op="WAIT", reason=checksum(step)),
        )
        os.write(out, f"told {step} {time.time()}\n".encode())
        if step % 97 == 0:
            mark = json.dumps(store.watermark())
            # The checkpoint: only what was written here can be resumed from.
            fresh = folder / "mark.tmp"
            fresh.write_text(json.dumps({"step": step, "mark": json.loads(mark)}))
            os.replace(fresh, folder / "mark.json")
        time.sleep(0.0002 * (step % 7))


def look(folder: Path, told: list[tuple[int, float]], killed: float) -> int:
    with open_run(folder) as run:
        assert run.query("PRAGMA integrity_check").rows == [("ok",)]
        epochs = [step for (step,) in run.query("SELECT step FROM epochs ORDER BY id").rows]
        decisions = run.query("SELECT step, reason FROM decisions ORDER BY id").rows
        assert run.info.status == "running"
    assert epochs == list(range(1, len(epochs) + 1)), "rows are missing in between"
    assert [step for step, _ in decisions] == epochs, "rows told together were torn apart"
    assert all(reason == checksum(step) for step, reason in decisions), "a row is not whole"
    old = [step for step, at in told if at < killed - LOST_AT_MOST_S]
    assert not old or len(epochs) >= old[-1], f"lost {old[-1] - len(epochs)} rows over a second old"
    return len(epochs)


def main(arguments: list[str]) -> int:
    base, kills = Path(arguments[0]), int(arguments[1])
    draw = random.Random(int(arguments[2]) if len(arguments) > 2 else 0)
    folder = base / "run"
    lost: list[int] = []
    resume: Any = False
    start = 0
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                write_forever(folder, resume, start, write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            first = pipe.readline()
            assert first, "the writer stopped by itself"
            lines = [first]
            deadline = time.time() + draw.uniform(0.0, 1.2)
            os.set_blocking(pipe.fileno(), False)
            while time.time() < deadline:
                lines += pipe.readlines() or []
                time.sleep(0.005)
            killed = time.time()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.set_blocking(pipe.fileno(), True)
            lines += pipe.readlines()
        told = []
        for line in lines:
            if line.endswith(b"\n"):
                _, step, at = line.split()
                told.append((int(step), float(at)))
        kept = look(folder, told, killed)
        lost.append(told[-1][0] - kept)
        mark = folder / "mark.json"
        if mark.exists():
            saved = json.loads(mark.read_text())
            start, resume = saved["step"], saved["mark"]
        else:
            start, resume = 0, True
    print(json.dumps({"kills": kills, "most_rows_lost": max(lost), "rows": kept}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
