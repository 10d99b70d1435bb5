"""Lists the runs below a folder with their state, and rolls a store back to a watermark.

A run is a folder with a `run.db`, or with a `config.yaml` beside `checkpoints` or a lock file.
Searches, clones and proofs have no store and are listed too. Listing never disturbs a running run.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from esper.leyline.errors import ConfigError, UsageError, reason_of
from esper.leyline.records import copy_fields
from esper.nissa.columns import TABLES, plain_data, plain_value
from esper.nissa.database import (
    LOCK_FILE,
    STORE_FILE,
    StoreError,
    TimeLimit,
    connect_reader,
    unanswered,
)
from esper.nissa.query import restrict
from esper.nissa.schema_runs import RunRow
from esper.nissa.writer import encode, insert_rows, read_records
from esper.utils.files import is_locked
from esper.utils.settings import read_document

# ---- Watermarks, rolling back to one, and the row of the run


_KEPT_MARKS = 64

_RESET = ("note", "ended", "val_score", "test_score", "twin_val_score", "twin_test_score")


def commit_watermark(
    connection: sqlite3.Connection, run_id: str, sinks: Mapping[str, Any]
) -> dict[str, Any]:
    """Commit a watermark to disk and return it as plain data."""
    # A checkpoint survives a power cut, so the rows it refers to must, too.
    connection.execute("PRAGMA synchronous = FULL")
    try:
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            positions = read_positions(connection)
            last = connection.execute("SELECT MAX(number) FROM watermarks").fetchone()[0]
            number = (last or 0) + 1
            connection.execute(
                "INSERT INTO watermarks (number, positions, sinks, time) VALUES (?, ?, ?, ?)",
                (number, json.dumps(positions), json.dumps(plain_data(sinks)), time.time()),
            )
            connection.execute("DELETE FROM watermarks WHERE number <= ?", (number - _KEPT_MARKS,))
    finally:
        connection.execute("PRAGMA synchronous = NORMAL")
    return {"run": run_id, "number": number, "positions": positions, "sinks": plain_data(sinks)}


def read_positions(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the last id of every table but `runs`."""
    return {
        table.name: connection.execute(f'SELECT MAX(id) FROM "{table.stored_as}"').fetchone()[0]
        or 0
        for table in TABLES.values()
        if table.name != "runs"
    }


def roll_back(
    connection: sqlite3.Connection, path: Path, mark: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Delete all rows after a watermark, or all without one; return the cursors of the sinks."""
    wanted = dict.fromkeys(read_positions(connection), 0)
    number = 0
    sinks: dict[str, Any] = {}
    if mark is not None:
        _check_mark(connection, path, mark)
        wanted |= mark["positions"]
        number = mark["number"]
        sinks = dict(mark["sinks"])
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for name, position in wanted.items():
            connection.execute(f'DELETE FROM "{TABLES[name].stored_as}" WHERE id > ?', (position,))
        connection.execute("DELETE FROM watermarks WHERE number > ?", (number,))
        reset = ", ".join(f"{name} = NULL" for name in (*_RESET, "parameters"))
        connection.execute(
            f"UPDATE runs SET status = 'running', resumes = COALESCE(resumes, 0) + 1, {reset}"
        )
    return sinks


def _check_shape(path: Path, mark: Mapping[str, Any]) -> None:
    """Refuse a watermark that `commit_watermark` cannot have written."""
    positions = mark.get("positions")
    is_whole = (
        isinstance(mark.get("number"), int)
        and isinstance(mark.get("sinks"), Mapping)
        and isinstance(positions, Mapping)
        and all(name in TABLES and type(last) is int for name, last in positions.items())
    )
    if not is_whole:
        raise StoreError(
            f"the checkpoint does not say where the store {path} stood; use another copy of it"
        )


def _check_mark(connection: sqlite3.Connection, path: Path, mark: Mapping[str, Any]) -> None:
    _check_shape(path, mark)
    run_id = connection.execute("SELECT run_id FROM runs").fetchone()
    if run_id is None or run_id[0] != mark.get("run"):
        raise StoreError(
            f"{path} belongs to another run than the checkpoint; put the store back that was "
            "beside it, or move this one away to continue without it"
        )
    found = read_positions(connection)
    behind = [name for name, position in mark["positions"].items() if found[name] < position]
    if behind:
        raise StoreError(
            f"{path} holds less than the checkpoint knows (in {', '.join(behind)}); put the store "
            "back that was beside it, or move this one away to continue without it"
        )


def insert_run(connection: sqlite3.Connection, run: RunRow) -> None:
    """Insert the row of a new run, with its id and the time."""
    table = TABLES["runs"]
    insert_rows(connection, table, [encode(table, run, time.time())])
    created = {"run_id": secrets.token_hex(8), "created": time.time(), "resumes": 0}
    change_run(connection, {**created, "status": "running"})


def change_run(connection: sqlite3.Connection, changes: Mapping[str, Any]) -> None:
    """Set some columns of the run."""
    table = TABLES["runs"]
    assignments = ", ".join(f'"{name}" = ?' for name in changes)
    values = [plain_value(value, table.column(name)) for name, value in changes.items()]
    connection.execute(f"UPDATE runs SET {assignments}", values)


def read_run(connection: sqlite3.Connection) -> RunRow:
    """Return the row of the run; raise `StoreError` if there is none."""
    row = next(read_records(connection, "runs"), None)
    if not isinstance(row, RunRow):
        raise StoreError("the store holds no run; it is damaged")
    return row


State = Literal["running", "interrupted", "finished", "damaged"]

MAX_DEPTH = 4

LISTING_S = 1.0
"""Time limit of each store in a list."""

COMMAND = "command"
"""Key of the command in the settings of a search, a clone or a proof."""
RESULTS = {"search": "summary.json", "clone": "clone.json", "prove": "report.md"}
"""By command, the file with its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run in a list; absent is None."""

    path: Path
    state: State
    kind: str | None = None
    task: str | None = None
    controller: str | None = None
    seed: int | None = None
    done: int | None = None
    """Epochs of a growing run, rounds of a training one."""
    planned: int | None = None
    unit: str | None = None
    """epochs or rounds."""
    val_score: float | None = None
    """Validation score in points: of the last epoch or the kept network; of a training run the mean
    of its last round."""
    val_gain: float | None = None
    """That score minus the twin's validation score."""
    test_score: float | None = None
    """Score on the test split, measured once, when a growing run ends."""
    test_gain: float | None = None
    """That score minus the twin's test score."""
    created: float | None = None
    """Seconds since 1970."""
    age_s: float | None = None
    """Seconds since something was last written."""
    note: str | None = None
    """Why it stopped, or what is wrong with it."""


def find_runs(root: str | os.PathLike[str]) -> list[RunEntry]:
    """Return all runs at or below a folder, newest first."""
    base = Path(root)
    if not os.path.isdir(base):
        raise UsageError(f"there is no folder {base}; give the folder that holds the runs")
    return newest_first(describe_run(folder) for folder in run_folders(base))


def newest_first(runs: Iterable[RunEntry]) -> list[RunEntry]:
    """Return runs sorted by the time of their last write, newest first."""
    return sorted(runs, key=lambda run: (run.age_s is None, run.age_s or 0.0))


def run_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Return the folder of every run at or below a folder; links to folders are not followed."""
    if _is_run(folder):
        yield folder
        return
    if depth == MAX_DEPTH:
        return
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if _is_real_folder(entry))
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield from run_folders(folder / name, depth + 1)


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_run(folder: Path) -> bool:
    # The methods of Path raise if a folder is not accessible.
    if os.path.isfile(folder / STORE_FILE) or os.path.islink(folder / STORE_FILE):
        return True
    # A config.yaml alone may belong to another program.
    marks = (LOCK_FILE, "checkpoints")
    has_mark = any(os.path.exists(folder / mark) for mark in marks)
    return has_mark and os.path.isfile(folder / "config.yaml")


def describe_run(folder: Path) -> RunEntry:
    """Return the entry of one run; if its store cannot be read, as damaged with the reason."""
    path = folder / STORE_FILE
    if not os.path.lexists(path):
        return _without_store(folder)
    limit = TimeLimit(LISTING_S)
    try:
        if os.path.islink(path):
            # A link may lead out of the folder whose runs are listed.
            raise StoreError(f"{STORE_FILE} is a link; put the store itself there to list it")
        connection = connect_reader(path, limit, busy_timeout_s=LISTING_S)
        try:
            restrict(connection)
            return describe_store(folder, connection)
        except sqlite3.Error as error:
            raise unanswered(f"read the store {path}", path, error, limit) from None
        finally:
            connection.close()
    except (StoreError, OSError, RecursionError, TypeError, ValueError) as error:
        note = reason_of(error)
        return RunEntry(path=folder, state="damaged", age_s=_age(folder), note=note)


def describe_store(folder: Path, connection: sqlite3.Connection) -> RunEntry:
    """Return the entry of the run of an open store."""
    # Read before the store: a run that ends in between then counts as running, not interrupted.
    is_written = is_locked(folder / LOCK_FILE)
    run = read_run(connection)
    is_training = run.kind == "train"
    last = connection.execute(
        "SELECT round + 1, score_mean, score_mean - gain_mean FROM rounds ORDER BY id DESC LIMIT 1"
        if is_training
        else "SELECT step, val_score, twin_score FROM epochs ORDER BY id DESC LIMIT 1"
    ).fetchone()
    done, score, twin = (0, None, None) if last is None else map(_number, last)
    if run.val_score is not None:
        score, twin = run.val_score, run.twin_val_score
    return copy_fields(
        RunEntry,
        run,
        path=folder,
        state=_state(run.status, is_written),
        done=done,
        planned=run.rounds if is_training else run.epochs,
        unit="rounds" if is_training else "epochs",
        val_score=score,
        val_gain=_difference(score, twin),
        test_gain=_difference(run.test_score, run.twin_test_score),
        age_s=_age(folder),
    )


def _difference(score: float | None, twin: float | None) -> float | None:
    return None if score is None or twin is None else float(score - twin)


def _number(value: Any) -> Any:
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"the store is damaged: it has {type(value).__name__} for a number")
    return value


def _state(status: str, is_written: bool) -> State:
    if status == "finished":
        return "finished"
    return "running" if is_written else "interrupted"


def _without_store(folder: Path) -> RunEntry:
    """Describe a run from its settings alone."""
    config = _read_config(folder)
    if config.get(COMMAND) in RESULTS:
        return _describe_played(folder, config)
    is_finished = os.path.isfile(folder / "summary.json")
    growth = config.get("growth")
    growth = growth if isinstance(growth, dict) else {}

    def text(name: str) -> str | None:
        value = config.get(name)
        return value if isinstance(value, str) else None

    def whole(name: str) -> int | None:
        value = growth.get(name)
        return value if isinstance(value, int) else None

    return RunEntry(
        path=folder,
        state="finished" if is_finished else "interrupted",
        kind="grow",
        task=text("task") or text("model"),
        controller=text("controller"),
        seed=whole("seed"),
        done=whole("epochs") if is_finished else None,
        planned=whole("epochs"),
        unit="epochs",
        age_s=_age(folder),
        note="it has no run.db",
    )


def _describe_played(folder: Path, config: Mapping[str, Any]) -> RunEntry:
    """Describe a search, a clone or a proof."""
    is_written = is_locked(folder / LOCK_FILE)
    command = config[COMMAND]
    result = folder / RESULTS[command]
    members, arms = config.get("members"), config.get("arms")
    family = members.get("family") if isinstance(members, dict) else None
    judged = arms[0] if isinstance(arms, list) and arms else None
    is_finished = os.path.isfile(result)
    rounds = done = None
    if command == "clone":
        # Its result is written after every round.
        rounds, done = config.get("rounds"), _cloned_rounds(result)
        is_finished = done == rounds
    return RunEntry(
        path=folder,
        state=_state("finished" if is_finished else "", is_written),
        kind=command,
        task=family if isinstance(family, str) else None,
        controller=judged if isinstance(judged, str) else None,
        done=done,
        planned=rounds if isinstance(rounds, int) else None,
        unit=None if done is None else "rounds",
        age_s=_age(folder),
        note=f"esper {command}: {result.name}" if is_finished else f"esper {command}",
    )


def _cloned_rounds(result: Path) -> int:
    try:
        return len(json.loads(_own_file(result).read_text(encoding="utf-8"))["rounds"])
    except (OSError, LookupError, RecursionError, TypeError, ValueError):
        return 0


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        data = read_document(_own_file(folder / "config.yaml"))
    except (OSError, ConfigError):
        return {}
    return data if isinstance(data, dict) else {}


def _own_file(path: Path) -> Path:
    """Return a path that is not a link, which may lead out of the folder."""
    if os.path.islink(path):
        raise FileNotFoundError(path)
    return path


def _age(folder: Path) -> float | None:
    names = (STORE_FILE, f"{STORE_FILE}-wal", "log.txt", "config.yaml", "results.jsonl")
    times = []
    for name in names:
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        # An empty file beside the store was made by a reader, not by the run.
        if status.st_size:
            times.append(status.st_mtime)
    return max(0.0, time.time() - max(times)) if times else None
