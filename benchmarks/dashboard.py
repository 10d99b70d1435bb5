"""Measure the live page: answers on millions of decisions, memory, and its load on a run.

Makes a training run of `--decisions` in `--out` (kept for the next time), starts the server on it,
and measures what an opened page asks for, the server's memory, and whether a writer that goes on
all the while ever waits. `--share` instead grows a network with a page open and says what telemetry
and page cost together, as a share of that run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.table import print_table

ROWS = 64
STEPS = 150
NAME = "many"


def fill(folder: Path, decisions: int) -> None:
    """Make a training run with so many decisions, and all that is recorded beside them."""
    from esper.nissa import RunRow, open_store

    rounds = -(-decisions // (ROWS * STEPS))
    row = RunRow(
        kind="train", task="digits", rounds=2 * rounds, rows=ROWS, slots=["r0c0", "r0c1", "r0c2"]
    )
    open_store(folder, row, sinks=()).close()
    connection = sqlite3.connect(folder / "run.db", isolation_level=None)
    # Nobody reads it yet, and what is cut short is made again.
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -400000")
    counted = (
        "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers "
        "WHERE n + 1 < ?) "
    )
    place = f"n / {ROWS * STEPS}, n / {STEPS} % {ROWS}, 1 + n % {STEPS}"
    statements = (
        (
            "INSERT INTO decisions (round, row, step, ordinal, op, slot, outcome, took_effect, "
            "confidence_op, value, reward, log_prob) SELECT "
            f"{place}, 0, CASE WHEN n % 1000 < 884 THEN 'WAIT' WHEN n % 1000 < 933 THEN "
            "'GERMINATE' WHEN n % 1000 < 977 THEN 'PRUNE' WHEN n % 1000 < 998 THEN "
            "'SET_ALPHA_TARGET' ELSE 'FOSSILIZE' END, CASE WHEN n % 1000 < 884 THEN NULL ELSE "
            "'r0c' || (n % 3) END, 'done', 1, 0.5, n % 97 / 97.0, n % 89 / 89.0 - 0.5, "
            "-(n % 83) / 83.0 FROM numbers",
            decisions,
        ),
        (
            "INSERT INTO epochs (round, row, step, val_score, twin_score) SELECT "
            f"{place}, 50 + n % 50, 50 + n % 47 FROM numbers",
            decisions,
        ),
        (
            "INSERT INTO seed_stages (round, row, step, ordinal, slot, stage, blueprint, alpha) "
            f"SELECT {place}, 0, 'r0c0', 'TRAINING', 'norm', 0.0 FROM numbers",
            decisions,
        ),
        (
            "INSERT INTO rounds (round, gain_mean, gain_p05, gain_p95, return_mean, score_mean, "
            "seconds, op_counts, reward_terms) SELECT n, n % 13 / 13.0, -1, 2, n % 11, 90, 10, "
            """'{"WAIT": 9000, "PRUNE": 600}', '{"gain": {"mean": 0.5, "share": 1.0}}' """
            "FROM numbers",
            rounds,
        ),
        (
            "INSERT INTO updates (round, ordinal, is_last, approx_kl, explained_variance) "
            "SELECT n / 4, n % 4, n % 4 = 3, n % 7 / 100.0, 0.5 FROM numbers",
            4 * rounds,
        ),
        (
            "INSERT INTO update_heads (round, ordinal, head, entropy_conditional, approx_kl) "
            "SELECT n / 32, n / 8 % 4, 'head' || (n % 8), n % 5 / 5.0, 0.01 FROM numbers",
            32 * rounds,
        ),
        (
            "INSERT INTO episodes (round, row, ordinal, episodic_return, gain) "
            f"SELECT n / {ROWS}, n % {ROWS}, 0, n % 9, 1 FROM numbers",
            ROWS * rounds,
        ),
    )
    for statement, count in statements:
        connection.execute("BEGIN")
        connection.execute(counted + statement, [count])
        connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder in a process of its own; give its address and its id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "esper", "dashboard", str(root), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield line.split(" at ")[-1].split()[0].rstrip("/"), process.pid
    finally:
        process.terminate()
        process.wait()


def ask(url: str, path: str, **parameters: object) -> tuple[float, int]:
    """Return how long an answer took, and its size."""
    started = time.perf_counter()
    with urllib.request.urlopen(f"{url}{path}?{urlencode(parameters)}") as answer:
        size = len(answer.read())
    return time.perf_counter() - started, size


def listen(url: str, name: str, over: threading.Event) -> None:
    """Hold a stream open, as a page does."""
    with urllib.request.urlopen(f"{url}/api/stream?{urlencode({'id': name})}") as stream:
        while not over.is_set():
            stream.readline()


def memory(pid: int) -> float:
    """Return the most memory a process had, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def processor(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load_page(url: str, name: str) -> list[tuple[str, float, int]]:
    """Ask for everything an opened page asks for."""
    last = json.load(urllib.request.urlopen(f"{url}/api/run?{urlencode({'id': name})}"))
    here = {"id": name, "round": last["episodes"]["last"] or 0, "row": 0}
    return [
        ("the list of runs", *ask(url, "/api/runs")),
        ("the top of the run", *ask(url, "/api/run", id=name)),
        ("all curves", *ask(url, "/api/series", id=name)),
        ("a garden", *ask(url, "/api/garden", **here)),
        ("decisions of an episode", *ask(url, "/api/decisions", **here, acted=1)),
        ("predicted and real returns", *ask(url, "/api/foreseen", **here)),
    ]


def write_on(folder: Path, seconds: float) -> tuple[int, str]:
    """Write rounds all the time; return the rows and how long the writer was behind.

    A store that could not be written to, because somebody held it, would end this with an error.
    """
    from esper.nissa import RunRow, open_store, query_run
    from esper.nissa.schema_runs import RoundRow

    store = open_store(folder, RunRow(kind="train", rounds=1000), sinks=())
    until, number = time.monotonic() + seconds, 0
    columns = {"row": list(range(ROWS)), "op": ["WAIT"] * ROWS, "reward": [0.5] * ROWS}
    while time.monotonic() < until:
        for step in range(1, 21):
            store.write_columns("decisions", {**columns, "round": number, "step": step})
        store.write(RoundRow(round=number, gain_mean=0.1, seconds=1.0))
        number += 1
        time.sleep(0.02)
    store.finish("finished")
    store.close()
    waits, wait_s = query_run(folder, "SELECT waits, wait_s FROM runs").rows[0]
    return number * (20 * ROWS + 1), f"{waits or 0} times, {wait_s or 0:.2f} s"


def read_on(url: str, name: str, over: threading.Event) -> None:
    """Ask for the curves of a run that is being written, over and over."""
    while not over.wait(0.1):
        with suppress(urllib.error.HTTPError):
            # Until the list of runs is looked at again, the run is not known.
            ask(url, "/api/series", id=name)
            ask(url, "/api/garden", id=name)


def watch(url: str, run: Path) -> None:
    """Do what an open page does: load everything, listen, and ask again as a network grows."""
    while not (run / "run.db").exists():
        time.sleep(0.05)
    load_page(url, run.name)
    over = threading.Event()
    threading.Thread(target=listen, args=(url, run.name, over), daemon=True).start()
    while not over.wait(3.0):
        ask(url, "/api/garden", id=run.name)
        ask(url, "/api/decisions", id=run.name, acted=1)


def growing_share(task: str, epochs: int) -> list[str]:
    """Grow a network with a page open; return what telemetry and page cost of the run."""
    from benchmarks.telemetry import growing_share as telemetry_share

    with tempfile.TemporaryDirectory() as root, serving(Path(root)) as (url, pid):
        # What the server loads for its first answer is not an open page's.
        ask(url, "/api/runs")
        # In a process of its own: what a browser does is not the run's cost.
        page = multiprocessing.get_context("spawn").Process(
            target=watch, args=(url, Path(root) / "run"), daemon=True
        )
        page.start()
        before = processor(pid)
        cost = telemetry_share(task, epochs, Path(root) / "run")
        spent = processor(pid) - before
        page.terminate()
        page.join()
    # A page asks by the clock, whatever the run gets done meanwhile; telemetry costs by the epoch.
    telemetry = (cost["calls_s"] + cost["threads_s"]) / cost["own_s"]
    shown = spent / cost["run_s"]
    shares = (telemetry, shown, telemetry + shown)
    return [f"{cost['run_s']:.1f}", f"{cost['own_s']:.1f}", *(f"{100 * one:.2f}" for one in shares)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks dashboard", description=__doc__)
    parser.add_argument("--decisions", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs/dashboard"))
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the writer writes")
    parser.add_argument("--share", action="store_true", help="only what a page costs a run")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=int, default=120)
    options = parser.parse_args(arguments)
    if options.share:
        row = growing_share(options.task, options.epochs)
        print_table(["run s", "its processor s", "telemetry %", "page %", "together %"], [row])
        return 0
    if not (options.out / NAME / "run.db").exists():
        started = time.perf_counter()
        fill(options.out / NAME, options.decisions)
        print(f"made {options.decisions:,} decisions in {time.perf_counter() - started:.0f} s\n")
    with serving(options.out) as (url, pid):
        answers = load_page(url, NAME)
        answers += [
            ("all decisions of one op", *ask(url, "/api/decisions", id=NAME, op="FOSSILIZE")),
            ("all but waiting", *ask(url, "/api/decisions", id=NAME, acted=1)),
        ]
        print_table(
            ["question", "ms", "kB"],
            [[n, f"{1e3 * s:.0f}", f"{b / 1e3:.0f}"] for n, s, b in answers],
        )
        rows = []
        for count in (0, 3):
            with tempfile.TemporaryDirectory(dir=options.out) as folder:
                over = threading.Event()
                readers = [
                    threading.Thread(target=read_on, args=(url, Path(folder).name, over))
                    for _ in range(count)
                ]
                for reader in readers:
                    reader.start()
                rows.append([count, *write_on(Path(folder), options.seconds)])
                over.set()
                for reader in readers:
                    reader.join()
        print()
        print_table(["pages open", "rows written", "waited for the queue"], rows)
        print(f"\nserver: {memory(pid):.0f} MB at most")
    return 0
