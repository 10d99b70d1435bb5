"""Measure the cost of telemetry, per call and as a share of a growing run, and of queries.

The share is measured in one run of `digits`: the processor time of calls to the store and of its
threads, over the processor time of the run. `--fill N` makes a store of N decisions in `--out` and
asks it questions.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.table import print_table

ROWS = 64
STEPS = 150


def fill(folder: Path, rows: int) -> None:
    """Make a store with so many decisions, as a long training run would leave it."""
    from esper.nissa import RunRow, open_store

    open_store(folder, RunRow(kind="train", task="digits", rounds=rows), sinks=()).close()
    connection = sqlite3.connect(folder / "run.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    connection.execute(
        """
        WITH RECURSIVE numbers(n) AS (
            SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :rows
        )
        INSERT INTO decisions (round, row, step, ordinal, op, took_effect, value, reward, log_prob)
        SELECT
            n / (:lanes * :steps), n / :steps % :lanes, 1 + n % :steps, 0,
            CASE
                WHEN n % 1000 < 884 THEN 'WAIT'
                WHEN n % 1000 < 933 THEN 'GERMINATE'
                WHEN n % 1000 < 977 THEN 'PRUNE'
                WHEN n % 1000 < 998 THEN 'SET_ALPHA_TARGET'
                ELSE 'FOSSILIZE'
            END,
            1, n % 97 / 97.0, n % 89 / 89.0 - 0.5, -(n % 83) / 83.0
        FROM numbers
        """,
        {"rows": rows, "lanes": ROWS, "steps": STEPS},
    )
    connection.execute("COMMIT")
    connection.close()


def questions(rows: int) -> Iterator[str]:
    """Return questions whose conditions have an index."""
    last = (rows - 1) // (ROWS * STEPS)
    yield f"SELECT * FROM decisions WHERE round = {last} AND row = 0 AND step = 1"
    yield f"SELECT op, COUNT(*), AVG(reward) FROM decisions WHERE round = {last // 2} GROUP BY op"
    yield "SELECT COUNT(*) FROM decisions WHERE op = 'FOSSILIZE'"
    yield "SELECT round, row, step FROM decisions WHERE op = 'FOSSILIZE' ORDER BY id DESC LIMIT 20"


def per_call(count: int) -> list[tuple[str, float]]:
    """Return what a producer pays per call, in microseconds."""
    from esper.nissa import RunRow, open_store
    from esper.nissa.schema import DecisionRow, EpochRow

    results: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder, RunRow(task="digits"), queue_rows=10_000_000)
        store.watermark()
        started = time.perf_counter()
        for step in range(20):
            store.write(EpochRow(step=-1 - step))
            store.watermark()
        results.append(("watermark", 1e6 * (time.perf_counter() - started) / 20))

        def measure(name: str, call: Callable[[int], None], rows: int = 1) -> None:
            store.flush()
            started = time.perf_counter()
            for number in range(count):
                call(number)
            results.append((name, 1e6 * (time.perf_counter() - started) / (count * rows)))

        measure("epoch", lambda n: store.write(EpochRow(step=n, val_score=1.0, val_loss=0.5)))
        measure("decision", lambda n: store.write(DecisionRow(step=n, op="WAIT", outcome="done")))
        measure("event", lambda n: store.event("note", "something happened", step=n))
        columns: dict[str, Any] = {"row": list(range(ROWS)), "op": ["WAIT"] * ROWS}
        measure(
            f"decision, {ROWS} as columns",
            lambda n: store.write_columns("decisions", {**columns, "round": 1, "step": n}),
            ROWS,
        )
        store.close()
    return results


def growing_share(task_name: str, epochs: int | None, out: Path | None = None) -> dict[str, float]:
    """Return what telemetry cost one growing run; its store is kept where `out` names a folder.

    All but `run_s` is processor time, `own_s` that of the thread that grows the network, calls
    included: a busy machine makes neither look small nor large.
    """
    from esper.growth.recorded import SAVE_EVERY_S
    from esper.growth.recorder import EpochRecorder, record_end, record_start, run_row
    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import task_config, task_run
    from esper.nissa import open_store

    task = get_task(task_name)
    changes = {} if epochs is None else {"epochs": epochs}
    config = task_config(task, seed=0, **changes)
    run = task_run(task, task.load(), config=config, controller="heuristic")
    clock = time.thread_time
    told = 0.0
    with tempfile.TemporaryDirectory() as made:
        folder = made if out is None else out
        started, cpu, own = time.perf_counter(), time.process_time(), clock()
        entered = clock()
        row = run_row(run, Path(folder), config.to_mapping(), "esper")
        store = open_store(folder, row)
        record_start(store, run)
        recorder = EpochRecorder(store, run)
        told += clock() - entered
        marked = time.monotonic()
        for record in run.epochs():
            entered = clock()
            recorder.record(record)
            if time.monotonic() - marked > SAVE_EVERY_S:
                store.watermark()
                marked = time.monotonic()
            told += clock() - entered
        grown = run.finish()
        entered = clock()
        record_end(store, grown)
        store.close()
        told += clock() - entered
        total = time.perf_counter() - started
        own = clock() - own
        background = time.process_time() - cpu - own
    return {"run_s": total, "own_s": own, "calls_s": told, "threads_s": background}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks telemetry", description=__doc__)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--fill", type=int, metavar="N", help="only make a store of N decisions")
    parser.add_argument("--out", type=Path, default=Path("runs/filled"))
    options = parser.parse_args(arguments)
    if options.fill:
        from esper.nissa import query_run

        started = time.perf_counter()
        fill(options.out, options.fill)
        print(f"{options.fill:,} decisions in {time.perf_counter() - started:.1f} s\n")
        rows = []
        for sql in questions(options.fill):
            started = time.perf_counter()
            found = len(query_run(options.out, sql).rows)
            rows.append([sql, found, f"{1e3 * (time.perf_counter() - started):.1f}"])
        print_table(["question", "rows", "ms"], rows)
        return 0
    print_table(
        ["call", "µs for the producer"], [[n, f"{us:.1f}"] for n, us in per_call(options.calls)]
    )
    print()
    shares = []
    for _ in range(options.repeats):
        cost = growing_share(options.task, options.epochs)
        share = (cost["calls_s"] + cost["threads_s"]) / cost["own_s"]
        shares.append([*(f"{value:.3f}" for value in cost.values()), f"{100 * share:.2f}"])
    print_table(["run s", "processor s", "in calls s", "its threads s", "telemetry %"], shares)
    return 0
