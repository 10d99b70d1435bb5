"""Hand-made runs to report on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    RunSummary,
    SlotRecord,
    seed_records,
)

SLOTS = ("r0c0", "r0c1", "r0c2")
HOST_PARAMETERS = 4_210
HOST_FLOPS = 84_000

# Stage and alpha at the end of each epoch from the first to the last one named.
Life = Sequence[tuple[int, int, str, float, float]]

PRUNED_LIFE: Life = (
    (7, 7, "GERMINATED", 0.0, 0.0),
    (8, 12, "TRAINING", 0.0, 0.0),
    (13, 17, "BLENDING", 0.2, 0.6),
    (18, 18, "PRUNED", 0.0, 0.0),
    (19, 23, "EMBARGOED", 0.0, 0.0),
    (24, 24, "RESETTING", 0.0, 0.0),
)
KEPT_LIFE: Life = (
    (26, 26, "GERMINATED", 0.0, 0.0),
    (27, 33, "TRAINING", 0.0, 0.0),
    (34, 38, "BLENDING", 0.2, 1.0),
    (39, 44, "HOLDING", 1.0, 1.0),
    (45, 60, "FOSSILIZED", 1.0, 1.0),
)


def make_slot(name: str, **changes: object) -> SlotRecord:
    empty = SlotRecord(
        name=name,
        stage="DORMANT",
        blueprint=None,
        alpha=0.0,
        alpha_target=0.0,
        parameters=0,
        flops=0,
        epochs_in_stage=-1,
        age=-1,
        contribution=None,
        contribution_se=None,
    )
    return replace(empty, **changes)  # type: ignore[arg-type]


def make_decision(op: str, slot: str | None = None, **changes: object) -> DecisionRecord:
    plain = DecisionRecord(
        op=op,
        slot=slot,
        blueprint=None,
        style=None,
        tempo=None,
        alpha_target=None,
        alpha_speed=None,
        alpha_curve=None,
        outcome="done",
        reason="",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def make_epoch(epoch: int, score: float, **changes: object) -> EpochRecord:
    plain = EpochRecord(
        epoch=epoch,
        train_loss=None,
        val_loss=0.5,
        val_score=score,
        twin_score=None,
        stabilized=False,
        plateau_epochs=0,
        parameters=HOST_PARAMETERS,
        flops=HOST_FLOPS,
        slots=tuple(make_slot(name) for name in SLOTS),
        decision=make_decision("WAIT"),
        seconds=0.25,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


DECISIONS: dict[int, DecisionRecord] = {
    6: make_decision(
        "GERMINATE",
        "r0c0",
        blueprint="norm",
        style="LINEAR_ADD",
        tempo=5,
        alpha_target=0.7,
    ),
    7: make_decision("ADVANCE", "r0c0"),
    10: make_decision(
        "ADVANCE", "r0c0", outcome="gate_failed", reason="G2: 3 of 5 epochs in training"
    ),
    12: make_decision("ADVANCE", "r0c0"),
    17: make_decision("PRUNE", "r0c0", alpha_speed=0, alpha_curve="LINEAR"),
    20: make_decision(
        "GERMINATE",
        "r0c1",
        blueprint="conv_light",
        style="SIGMOID_ADD",
        tempo=5,
        alpha_target=1.0,
        outcome="illegal",
        reason="another slot is cooling down",
    ),
    25: make_decision(
        "GERMINATE",
        "r0c1",
        blueprint="conv_light",
        style="SIGMOID_ADD",
        tempo=5,
        alpha_target=1.0,
    ),
    26: make_decision("ADVANCE", "r0c1"),
    33: make_decision("ADVANCE", "r0c1"),
    36: make_decision(
        "SET_ALPHA_TARGET",
        "r0c1",
        style="SIGMOID_ADD",
        alpha_target=1.0,
        alpha_speed=3,
        alpha_curve="COSINE",
    ),
    44: make_decision("FOSSILIZE", "r0c1"),
}


def growing_run(*, with_twin: bool = True) -> list[EpochRecord]:
    """Sixty epochs: a seed that was pruned, one that was kept, a slot that was never used."""
    history = []
    for epoch in range(1, 61):
        wobble = 0.6 * math.sin(epoch * 1.7)
        twin = 95.0 - 45.0 * math.exp(-epoch / 7) + wobble
        kept = max(0.0, min(1.0, (epoch - 33) / 10)) * 1.9
        pruned = -0.9 if 13 <= epoch <= 17 else 0.0
        slots = (
            _living("r0c0", "norm", 32, epoch, PRUNED_LIFE, 13, (-0.82, 0.31)),
            _living("r0c1", "conv_light", 1_810, epoch, KEPT_LIFE, 34, (1.87, 0.42)),
            make_slot("r0c2"),
        )
        decision = DECISIONS.get(epoch, make_decision("WAIT"))
        history.append(
            make_epoch(
                epoch,
                twin + kept + pruned,
                twin_score=twin if with_twin else None,
                parameters=HOST_PARAMETERS + sum(slot.parameters for slot in slots),
                flops=HOST_FLOPS + sum(slot.flops for slot in slots),
                slots=slots,
                decision=None if epoch == 60 else decision,
            )
        )
    return history


def summary_of(history: Sequence[EpochRecord], **changes: object) -> RunSummary:
    last = history[-1]
    plain = RunSummary(
        task="digits",
        controller="heuristic",
        seed=7,
        epochs=len(history),
        parameters_before=HOST_PARAMETERS,
        parameters_after=last.parameters,
        flops_before=HOST_FLOPS,
        flops_after=last.flops,
        val_score=last.val_score,
        test_score=None,
        twin_val_score=last.twin_score,
        twin_test_score=None,
        seeds=seed_records(tuple(history)),
        seconds=74.2,
        kept_epoch=last.epoch,
        twin_kept_epoch=None if last.twin_score is None else last.epoch,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


CONFIG = {
    "task": "digits",
    "seed": 7,
    "epochs": 60,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": None},
    "rules": {"embargo_epochs": 5, "gates": "permissive"},
    "slots": ["r0c0", "r0c1", "r0c2"],
}
COMMAND = "esper grow --task digits --controller heuristic --seed 7 --out runs/demo"
VERSIONS = {"esper": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}


def _living(
    name: str,
    blueprint: str,
    parameters: int,
    epoch: int,
    life: Life,
    measured: int,
    contribution: tuple[float, float],
) -> SlotRecord:
    for first, last, stage, begin, end in life:
        if not first <= epoch <= last:
            continue
        share = (epoch - first) / max(1, last - first)
        is_gone = stage in ("PRUNED", "EMBARGOED", "RESETTING")
        known = epoch >= measured and not is_gone
        return make_slot(
            name,
            stage=stage,
            blueprint=blueprint,
            alpha=begin + share * (end - begin),
            parameters=0 if is_gone else parameters,
            flops=0 if is_gone else 20 * parameters,
            contribution=contribution[0] if known else None,
            contribution_se=contribution[1] if known else None,
        )
    return make_slot(name)
