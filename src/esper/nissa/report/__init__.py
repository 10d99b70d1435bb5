"""Reports of runs: a page and a picture, made from the store."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError
from esper.leyline.records import ModuleRecord, RunSummary, copy_fields, seeds_at_end, stacks_at_end
from esper.nissa.database import ANSWER_S, StoreError
from esper.nissa.reader import StoredRun, open_run, read_history
from esper.nissa.report.growing import render_report
from esper.nissa.report.page import About, group_alarms, write_report
from esper.nissa.report.picture import growth_picture
from esper.nissa.report.training import read_training, render_training
from esper.nissa.schema import AlarmRow, EventKind
from esper.nissa.schema_runs import RunRow

__all__ = ["growth_picture", "render_report", "render_run", "report_run", "write_report"]


# ---- The report of a run, finished or not


REPORT_FILE = "report.html"
SHOWN_EPOCHS = 5_000


def report_run(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run folder and return its path, `RUN/report.html` by default.

    Raises:
        StoreError: There is no store, or it cannot be read.
        CheckpointError: The file cannot be written.
    """
    with open_run(run) as stored:
        return write_run_report(stored, out)


def write_run_report(stored: StoredRun, out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of an open run; see `report_run`."""
    try:
        page = render_run(stored)
    except EsperError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # Each value has its type, but together they are inconsistent.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StoreError(
            f"no report can be made: the records in {stored.path} contradict each other "
            f"({reason}); use another copy of it, or, if nobody edited the file, report a bug"
        ) from error
    path = stored.folder / REPORT_FILE if out is None else Path(out)
    write_report(path, page)
    return path


def render_run(run: StoredRun) -> str:
    """Return the report of a recorded run as one HTML page."""
    info = run.info
    if info.kind == "train":
        return render_training(read_training(run), _about(run, info), **_origin(run, info))
    # Rows of an unknown kind of run are only counted: there may be millions.
    is_grown = info.kind == "grow"
    every = _every(run) if is_grown else 1
    history = read_history(run, every) if is_grown else []
    if every > 1:
        note = f"one epoch in {every:,} is shown"
        info = dataclasses.replace(info, note=f"{info.note}; {note}" if info.note else note)
    summary = None
    if info.status == "finished" and history:
        last = history[-1]
        kept = last.epoch if info.kept_epoch is None else info.kept_epoch
        summary = RunSummary(
            task=info.task or "",
            controller=info.controller or "",
            seed=info.seed or 0,
            epochs=last.epoch,
            parameters_before=info.host_parameters or history[0].parameters,
            parameters_after=info.parameters or last.parameters,
            flops_before=info.host_flops or history[0].flops,
            flops_after=info.flops or last.flops,
            val_score=last.val_score if info.val_score is None else info.val_score,
            test_score=info.test_score,
            twin_val_score=info.twin_val_score,
            twin_test_score=info.twin_test_score,
            seeds=seeds_at_end(history, kept),
            seconds=info.seconds or 0.0,
            kept_epoch=kept,
            twin_kept_epoch=info.twin_kept_epoch,
            stopped=info.stopped or "",
            stacks=stacks_at_end(history, kept),
            training_flops=last.training_flops,
            compute_budget=_started(run).get("compute_budget"),
            static_flops=None if last.depth is None else last.depth.static_flops,
        )
    return render_report(
        history,
        summary,
        about=_about(run, info),
        modules=read_modules(run),
        at_end=None if summary is None else _worth_at_end(run, summary.kept_epoch),
        **_origin(run, info),
    )


def _every(run: StoredRun) -> int:
    """Return the stride of the epochs to show, so that the page stays readable."""
    epochs: int = run.query("SELECT COUNT(*) FROM epochs", timeout_s=ANSWER_S).rows[0][0]
    return max(1, math.ceil(epochs / SHOWN_EPOCHS))


def _origin(run: StoredRun, info: RunRow) -> dict[str, Any]:
    """Return settings, command, versions and alarms of a run."""
    alarms = [row for row in run.records("alarms") if isinstance(row, AlarmRow)]
    return {
        "config": info.config if isinstance(info.config, dict) else {},
        "command": info.command or "not recorded",
        "versions": info.versions if isinstance(info.versions, dict) else {},
        "alarms": group_alarms(alarms),
    }


def read_modules(run: StoredRun) -> tuple[ModuleRecord, ...]:
    """Return what the host of a run is made of, as it was recorded at the start."""
    modules = _started(run).get("modules") or ()
    return tuple(ModuleRecord.from_mapping(module) for module in modules)


def _started(run: StoredRun) -> dict[str, Any]:
    """Return what was recorded about a run at its start."""
    rows = run.rows(
        "events", columns=["data"], where="kind = ?", parameters=[EventKind.TRAINING_STARTED]
    )
    found: Any = rows[-1]["data"] if rows else None
    return found if isinstance(found, dict) else {}


def _worth_at_end(run: StoredRun, kept_epoch: int) -> dict[str, tuple[float | None, float | None]]:
    """Return by slot the contribution of its seed in the kept network, and the standard error."""
    rows = run.rows(
        "contributions",
        columns=["slot", "value", "se"],
        where="kind = 'leave_one_out' AND step = ?",
        parameters=[kept_epoch],
    )
    return {str(row["slot"]): (row["value"], row["se"]) for row in rows}


def _about(run: StoredRun, info: RunRow) -> About:
    counts: dict[str, int] = {}
    if info.kind != "grow":
        for table in run.tables[1:]:
            # Ids count up from 1 and only the end of a table is ever deleted.
            rows = run.query(f'SELECT MAX(id) FROM "{table}"', timeout_s=ANSWER_S).rows
            counts[table] = rows[0][0] or 0
    return copy_fields(
        About,
        info,
        state=run.entry.state,
        planned=info.epochs if info.kind == "grow" else info.rounds,
        resumes=info.resumes or 0,
        counts=counts,
    )
