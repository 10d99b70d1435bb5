"""A made-up run that tells its store everything a real one would, and how to compare two stores."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.growth.recorder import EpochRows
from esper.leyline.records import DecisionRecord, EpochRecord, SlotRecord
from esper.nissa import RunRow, RunStore, open_run, open_store
from esper.nissa.columns import TABLES
from esper.nissa.schema import ContributionRow, StackRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow

SLOTS = ("r0c0", "r0c1")
EPOCHS = 30

STAGES = (
    ["DORMANT"] * 4
    + ["GERMINATED"]
    + ["TRAINING"] * 5
    + ["BLENDING"] * 5
    + ["HOLDING"] * 3
    + ["FOSSILIZED"] * 12
)


def run_row(**changes: Any) -> RunRow:
    return RunRow(
        **{
            "name": "made up",
            "task": "digits",
            "controller": "heuristic",
            "seed": 3,
            "epochs": EPOCHS,
            "slots": list(SLOTS),
            "config": {"growth": {"epochs": EPOCHS, "twin": True}},
            **changes,
        }
    )


def hold_lock(folder: Path, run: RunRow) -> sqlite3.Connection:
    """Make a store and return another program's connection to it."""
    open_store(folder, run, sinks=()).close()
    return sqlite3.connect(
        folder / "run.db", isolation_level=None, check_same_thread=False, timeout=0.1
    )


def made_up_epoch(epoch: int) -> EpochRecord:
    stage = STAGES[epoch - 1]
    empty = stage == "DORMANT"
    blended = stage in ("BLENDING", "HOLDING", "FOSSILIZED")
    grown = SlotRecord(
        name=SLOTS[0],
        stage=stage,
        blueprint=None if empty else "conv_light",
        alpha=min(1.0, 0.2 * (epoch - 10)) if blended else 0.0,
        alpha_target=1.0 if blended else 0.0,
        parameters=0 if empty else 592,
        flops=0 if empty else 41_472,
        epochs_in_stage=0 if empty else epoch % 5,
        age=0 if empty else epoch - 4,
        contribution=0.1 * epoch if blended else None,
        contribution_se=0.05 if blended else None,
    )
    never = SlotRecord(
        name=SLOTS[1],
        stage="DORMANT",
        blueprint=None,
        alpha=0.0,
        alpha_target=0.0,
        parameters=0,
        flops=0,
        epochs_in_stage=0,
        age=0,
        contribution=None,
        contribution_se=None,
    )
    changes = epoch < EPOCHS and STAGES[epoch] != stage
    # One bad epoch, so that an alarm is raised and cleared again.
    score = 50.0 + 10 * math.log(epoch) - (12.0 if epoch == 17 else 0.0)
    return EpochRecord(
        epoch=epoch,
        train_loss=1.0 / epoch,
        val_loss=(6.0 if epoch == 17 else 1.1) / epoch,
        val_score=score,
        twin_score=None if epoch < 5 else score - 1,
        stabilized=epoch > 3,
        plateau_epochs=epoch % 3,
        parameters=6_418 + (0 if empty else 592),
        flops=1_622_656 + (0 if empty else 41_472),
        slots=(grown, never),
        decision=None
        if epoch == EPOCHS
        else DecisionRecord(
            op="ADVANCE" if changes else "WAIT",
            slot=SLOTS[0] if changes else None,
            blueprint=None,
            style=None,
            tempo=None,
            alpha_target=None,
            alpha_speed=None,
            alpha_curve=None,
            outcome="gate_failed" if epoch == 8 else "done",
            reason="too young" if epoch == 8 else "",
        ),
        seconds=0.05,
    )


HISTORY = [made_up_epoch(epoch) for epoch in range(1, EPOCHS + 1)]


def tell(
    folder: Path,
    *,
    resume: Mapping[str, Any] | bool = False,
    start: int = 0,
    stop_after: int = EPOCHS,
    mark_every: int = 5,
    marks: dict[int, dict[str, Any]] | None = None,
    crash: bool = False,
    **options: Any,
) -> None:
    """Tell the epochs after `start` up to `stop_after`; keep watermarks by epoch in `marks`.

    With `crash` the store is left as a killed process would leave it: rows are in the file, but
    nobody said that the run ended.
    """
    store = open_store(folder, run_row(), resume=resume, **options)
    if not start:
        store.event("training_started", "esper grow --task digits")
    rows = EpochRows(HISTORY[:start], host_parameters=6_418)
    for epoch in range(start + 1, stop_after + 1):
        store.write(*rows.of(HISTORY[epoch - 1]))
        tell_training(store, epoch)
        if epoch % mark_every == 0 and marks is not None:
            marks[epoch] = store.watermark()
    if crash:
        kill(store)
        return
    if stop_after == EPOCHS:
        store.finish("finished", val_score=90.0, parameters=7_010)
    store.close()


def tell_training(store: RunStore, epoch: int) -> None:
    """Tell what a learner would, as if every epoch were a round."""
    entropy = 0.01 if 9 <= epoch <= 20 else 0.6
    store.write(
        UpdateHeadRow(
            round=epoch, head="blueprint", entropy_conditional=entropy, usage=0.05, free_steps=9
        )
    )
    store.write(
        UpdateHeadRow(round=epoch, head="op", entropy_conditional=0.4, usage=1.0, free_steps=400)
    )
    store.write(UpdateRow(round=epoch, ordinal=0, is_last=False, approx_kl=9.0))
    store.write(
        UpdateRow(round=epoch, ordinal=1, approx_kl=0.2 if epoch == 12 else 0.01, env_steps=epoch)
    )
    store.write(EpisodeRow(round=epoch, episodic_return=float(epoch), rolled_back=epoch == 6))
    store.write(RoundRow(round=epoch, score_mean=50.0, wait_share_free=0.99, free_steps=400))
    store.write(ContributionRow(round=epoch, step=3, kind="solo_on", slot=SLOTS[0], value=1.0))
    store.write(StackRow(round=epoch, step=EPOCHS + 1, stack="layers", awake=2, blocks=4))


def kill(store: RunStore) -> None:
    """Leave a store behind as SIGKILL would, except that what was told is committed."""
    store.flush()
    for pump in store._pumps:
        pump.close("failed")
    store._writer.stop()
    store._lock.release()
    store._is_closed = True


def contents(folder: Path, *, volatile: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return everything a store holds that identical runs must agree on, table by table."""
    found: dict[str, list[dict[str, Any]]] = {}
    with open_run(folder) as run:
        for table in TABLES.values():
            stable = [c.name for c in table.columns if volatile or not c.is_volatile]
            rows = run.rows(table.name, columns=stable)
            found[table.name] = [row for row in rows if volatile or not row.get("volatile")]
    return found
