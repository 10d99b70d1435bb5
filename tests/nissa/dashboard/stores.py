"""Made-up runs to show: one that grew, one that trains, hostile texts and all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from esper.nissa import RunRow, RunStore, open_run, open_store
from esper.nissa.schema import (
    AlarmRow,
    ContributionRow,
    DecisionRow,
    EpochRow,
    SeedRow,
    StackRow,
    StageRow,
)
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow

T = TypeVar("T")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e'\";--"
SLOTS = ["r0c0", "r0c1"]
EPOCHS = 20


def asked(folder: Path, read: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a reader finds in a run, opened for this answer alone."""
    with open_run(folder) as run:
        return read(run, *arguments, **named)


def growing(folder: Path, *, epochs: int = EPOCHS, finish: bool = True, **changes: object) -> None:
    """A network that grew one seed and kept it."""
    row = {
        "kind": "grow",
        "task": "digits",
        "controller": "heuristic",
        "epochs": EPOCHS,
        "slots": SLOTS,
        "host_parameters": 100,
        "config": {"growth": {"epochs": EPOCHS}},
        **changes,
    }
    store = open_store(folder, RunRow(**row), sinks=())  # type: ignore[arg-type]
    for step in range(1, epochs + 1):
        grow_epoch(store, step)
    if finish:
        store.finish("finished", val_score=92.0, twin_val_score=90.0, parameters=150)
    store.close()


def deepening(folder: Path) -> None:
    """A network whose blocks woke after the third of ten epochs, and within the sixth."""
    row = RunRow(
        kind="grow",
        task="sources",
        controller="schedule",
        epochs=10,
        slots=[],
        host_parameters=100,
        config={"growth": {"deepen": {"start": None}}},
    )
    woken = {3: (1, 2, 30), 6: (2, 4, 55)}
    store = open_store(folder, row, sinks=())
    for step in range(1, 11):
        rows: list[Any] = []
        if step in woken:
            before, after, at = woken[step]
            rows.append(
                DecisionRow(
                    step=step,
                    ordinal=0,
                    op="DEEPEN",
                    slot="layers",
                    outcome="done",
                    reason=f"schedule: {before} to {after} blocks after step {at}",
                    blocks_before=before,
                    blocks_after=after,
                    training_step=at,
                )
            )
        awake = 1 if step <= 3 else 2 if step < 6 else 4
        rows.append(StackRow(step=step, ordinal=0, stack="layers", awake=awake, blocks=4))
        rows.append(
            EpochRow(
                step=step,
                val_score=50.0 + step,
                val_loss=1.0,
                parameters=100 * awake,
                host_parameters=100,
                training_steps=10 * step,
                training_flops=7e9 * step,
                static_flops=1e10 * step,
            )
        )
        store.write(*rows)
    store.finish("finished", val_score=60.0, parameters=400)
    store.close()


def grow_epoch(store: RunStore, step: int, blueprint: str = "conv_light") -> None:
    """Tell one epoch: a seed germinates after the third, is kept after the twelfth."""
    rows: list[object] = []
    if step > 3:
        stage = "TRAINING" if step < 8 else "BLENDING" if step < 12 else "FOSSILIZED"
        alpha = 0.0 if step < 8 else min(1.0, 0.25 * (step - 7))
        rows.append(
            StageRow(
                step=step,
                slot=SLOTS[0],
                stage=stage,
                entered=step in (4, 8, 12),
                blueprint=blueprint,
                alpha=alpha,
                contribution=0.5 * step if alpha else None,
                contribution_se=0.1 if alpha else None,
            )
        )
        rows.append(
            SeedRow(
                slot=SLOTS[0],
                blueprint=blueprint,
                germinated=3,
                ended=12 if step >= 12 else None,
                fate=stage.lower(),
                parameters=50,
                contribution=0.5 * step if alpha else None,
                contribution_se=0.1 if alpha else None,
            )
        )
    op = {3: "GERMINATE", 7: "ADVANCE", 11: "FOSSILIZE"}.get(step, "WAIT")
    slot = None if op == "WAIT" else SLOTS[0]
    rows.append(DecisionRow(step=step, op=op, slot=slot, outcome="done"))
    rows.append(
        EpochRow(
            step=step,
            val_score=score(step),
            twin_score=score(step) - 1.0,
            parameters=150 if step > 3 else 100,
            host_parameters=100,
            seconds=0.5,
        )
    )
    store.write(*rows)  # type: ignore[arg-type]


def score(step: int) -> float:
    """The score after an epoch."""
    return 50.0 + 10.0 * math.log(step)


def training(folder: Path, *, rounds: int = 3, finish: bool = True) -> None:
    """A controller that trains, two heads, one recorded row."""
    store = open_store(
        folder,
        RunRow(
            kind="train",
            task="digits",
            rounds=10,
            rows=2,
            slots=SLOTS,
            config={"ppo": {"gamma": 0.5}},
        ),
        sinks=(),
    )
    for number in range(rounds):
        train_round(store, number)
    if finish:
        store.finish("finished")
    store.close()


def train_round(store: RunStore, number: int) -> None:
    """Tell one round."""
    for step in (1, 2, 3):
        store.write(
            DecisionRow(
                round=number,
                step=step,
                op="GERMINATE" if step == 1 else "WAIT",
                slot=SLOTS[0] if step == 1 else None,
                blueprint="norm" if step == 1 else None,
                outcome="done",
                confidence_op=0.75,
                valid_op=2,
                alternatives={"op": [["WAIT", 0.25]]},
                value=1.0,
                q_taken=1.5,
                reward=float(step),
                reward_terms={"gain": float(step), "rent": 0.0},
            )
        )
        store.write(EpochRow(round=number, step=step, val_score=score(step)))
    for ordinal in (0, 1):
        for head in ("op", "slot"):
            store.write(
                UpdateHeadRow(
                    round=number,
                    ordinal=ordinal,
                    head=head,
                    entropy_conditional=0.9 - 0.1 * ordinal,
                )
            )
        store.write(
            UpdateRow(
                round=number,
                ordinal=ordinal,
                is_last=ordinal == 1,
                approx_kl=0.01 * (1 + ordinal),
                explained_variance=0.5,
                q_by_op={"WAIT": 1.0, "PRUNE": -1.0},
            )
        )
    store.write(
        ContributionRow(
            round=number, step=2, kind="interaction", slot="r0c0", other="r0c1", value=2.0
        )
    )
    store.write(EpisodeRow(round=number, episodic_return=6.0, gain=0.5, task="digits"))
    store.write(
        RoundRow(
            round=number,
            gain_mean=0.1 * number,
            score_mean=90.0 + number,
            seconds=10.0,
            update_seconds=2.0,
            twin_seconds=3.0,
            op_counts={"WAIT": 4, "GERMINATE": 2},
            reward_terms={"gain": {"mean": 0.5, "share": 0.9}},
        )
    )


def hostile(folder: Path) -> None:
    """A run whose every text is an attack."""
    store = open_store(
        folder,
        RunRow(
            kind="grow",
            name=HOSTILE,
            task=HOSTILE,
            controller=HOSTILE,
            command=HOSTILE,
            slots=[HOSTILE],
        ),
        sinks=(),
    )
    store.write(
        StageRow(step=1, slot=HOSTILE, stage="TRAINING", blueprint=HOSTILE, alpha=0.5),
        SeedRow(slot=HOSTILE, blueprint=HOSTILE, germinated=0, fate=HOSTILE),
        DecisionRow(
            step=1, op=HOSTILE, slot=HOSTILE, blueprint=HOSTILE, outcome=HOSTILE, reason=HOSTILE
        ),
        AlarmRow(step=1, monitor=HOSTILE, severity="critical", message=HOSTILE, advice=HOSTILE),
        EpochRow(step=1, val_score=50.0),
    )
    store.finish("failed", note=HOSTILE)
    store.close()
