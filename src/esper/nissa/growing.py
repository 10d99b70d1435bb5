"""The history of one growing network, as rows of the store and back.

`record_epoch` writes everything one epoch has to say in one transaction; it is a function of the
history alone, so a resumed run writes what an uninterrupted one would. `read_history` gives the
same records back, for reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    SeedRecord,
    SlotRecord,
    seed_records,
)
from esper.leyline.stages import MODULE_STAGES, SeedStage
from esper.nissa.columns import Row
from esper.nissa.events import EventKind
from esper.nissa.reader import StoredRun
from esper.nissa.schema import (
    ContributionRow,
    DecisionRow,
    EpochRow,
    EventRow,
    SeedRow,
    StageRow,
)
from esper.nissa.store import RunStore

_EMPTY = (SeedStage.DORMANT.name, SeedStage.UNKNOWN.name)
_MEASURED = (SeedStage.BLENDING.name, SeedStage.HOLDING.name)
_WITH_MODULE = tuple(stage.name for stage in MODULE_STAGES)


def record_epoch(
    store: RunStore,
    history: Sequence[EpochRecord],
    *,
    host_parameters: int | None = None,
    ablate_every: int = 1,
    **columns: Any,
) -> None:
    """Write the newest epoch of a history: measurements, slots, seeds, decision, events.

    Args:
        store: Where to.
        history: Every epoch so far, the newest last.
        host_parameters: Trainable parameters before growth.
        ablate_every: Contributions were measured at every this many epochs.
        columns: Further columns of `epochs`, such as `grad_norm`.
    """
    store.write(
        *epoch_rows(history, host_parameters=host_parameters, ablate_every=ablate_every, **columns)
    )


def epoch_rows(
    history: Sequence[EpochRecord],
    *,
    host_parameters: int | None = None,
    ablate_every: int = 1,
    **columns: Any,
) -> list[Row]:
    """Return the rows of the newest epoch; the epoch itself comes last, after what explains it."""
    record = history[-1]
    before = history[-2] if len(history) > 1 else None
    seeds, earlier = seed_records(list(history)), seed_records(list(history[:-1]))
    return [
        *_stage_rows(record, before),
        *_contribution_rows(record, ablate_every),
        *_seed_rows(seeds, earlier),
        *_decision_rows(record),
        *_event_rows(record, before, seeds, earlier),
        EpochRow(
            step=record.epoch,
            train_loss=record.train_loss,
            val_loss=record.val_loss,
            val_score=record.val_score,
            best_score=max(one.val_score for one in history),
            twin_score=record.twin_score,
            stabilized=record.stabilized,
            plateau_epochs=record.plateau_epochs,
            parameters=record.parameters,
            host_parameters=host_parameters,
            live_seeds=sum(slot.stage in _WITH_MODULE for slot in record.slots),
            seconds=record.seconds,
            **columns,
        ),
    ]


def _stage_rows(record: EpochRecord, before: EpochRecord | None) -> Iterator[Row]:
    previous = {slot.name: slot.stage for slot in before.slots} if before else {}
    for index, slot in enumerate(record.slots):
        if slot.stage in _EMPTY and slot.blueprint is None:
            continue
        yield StageRow(
            step=record.epoch,
            ordinal=index,
            slot=slot.name,
            stage=slot.stage,
            entered=previous.get(slot.name) != slot.stage,
            blueprint=slot.blueprint,
            alpha=slot.alpha,
            alpha_target=slot.alpha_target,
            epochs_in_stage=slot.epochs_in_stage,
            age=slot.age,
            parameters=slot.parameters,
            contribution=slot.contribution,
            contribution_se=slot.contribution_se,
        )


def _contribution_rows(record: EpochRecord, ablate_every: int) -> Iterator[Row]:
    if (record.epoch - 1) % ablate_every:
        return
    for slot in record.slots:
        if slot.contribution is not None and slot.stage in _MEASURED and slot.alpha > 0:
            yield ContributionRow(
                step=record.epoch,
                kind="leave_one_out",
                slot=slot.name,
                value=slot.contribution,
                se=slot.contribution_se,
            )


def _seed_rows(seeds: Sequence[SeedRecord], earlier: Sequence[SeedRecord]) -> Iterator[Row]:
    for ordinal, seed in enumerate(seeds):
        if ordinal >= len(earlier) or earlier[ordinal] != seed:
            yield SeedRow(
                ordinal=ordinal,
                slot=seed.slot,
                blueprint=seed.blueprint,
                germinated=seed.germinated,
                ended=seed.ended,
                fate=seed.fate,
                parameters=seed.parameters,
                contribution=seed.contribution,
                contribution_se=seed.contribution_se,
            )


def _decision_rows(record: EpochRecord) -> Iterator[Row]:
    decision = record.decision
    if decision is not None:
        yield DecisionRow(
            step=record.epoch,
            op=decision.op,
            slot=decision.slot,
            blueprint=decision.blueprint,
            style=decision.style,
            tempo=decision.tempo,
            alpha_target=decision.alpha_target,
            alpha_speed=decision.alpha_speed,
            alpha_curve=decision.alpha_curve,
            outcome=decision.outcome,
            reason=decision.reason,
            success=decision.outcome == "done",
            effective_op=decision.op if decision.outcome == "done" else "WAIT",
        )


def _event_rows(
    record: EpochRecord,
    before: EpochRecord | None,
    seeds: Sequence[SeedRecord],
    earlier: Sequence[SeedRecord],
) -> Iterator[Row]:
    def event(kind: EventKind, message: str, slot: str | None = None) -> Row:
        return EventRow(step=record.epoch, kind=kind, message=message, slot=slot)

    if record.stabilized and not (before and before.stabilized):
        yield event(EventKind.TAMIYO_INITIATED, "the host has settled")
    for ordinal, seed in enumerate(seeds):
        old = earlier[ordinal] if ordinal < len(earlier) else None
        what = f"{seed.blueprint} in {seed.slot}"
        if old is None:
            yield event(EventKind.SEED_GERMINATED, f"{what} germinated", seed.slot)
        elif old.fate != seed.fate:
            kind = {
                "fossilized": EventKind.SEED_FOSSILIZED,
                "pruned": EventKind.SEED_PRUNED,
            }.get(seed.fate, EventKind.SEED_STAGE_CHANGED)
            yield event(kind, f"{what}: {old.fate} to {seed.fate}", seed.slot)
    decision = record.decision
    if decision is not None and decision.outcome == "gate_failed":
        reason = decision.reason or f"{decision.op} was refused"
        yield event(EventKind.SEED_GATE_EVALUATED, reason, decision.slot)


def read_history(run: StoredRun) -> list[EpochRecord]:
    """Return the history of a growing run as it was recorded."""
    names = [str(name) for name in run.info.slots or ()]
    stages: dict[int, dict[str, SlotRecord]] = {}
    for stage in run.records("seed_stages"):
        assert isinstance(stage, StageRow)
        stages.setdefault(stage.step, {})[str(stage.slot)] = SlotRecord(
            name=str(stage.slot),
            stage=str(stage.stage),
            blueprint=stage.blueprint,
            alpha=stage.alpha or 0.0,
            alpha_target=stage.alpha_target or 0.0,
            parameters=stage.parameters or 0,
            epochs_in_stage=stage.epochs_in_stage or 0,
            age=stage.age or 0,
            contribution=stage.contribution,
            contribution_se=stage.contribution_se,
        )
    decisions = {}
    for decision in run.records("decisions"):
        assert isinstance(decision, DecisionRow)
        decisions[decision.step] = DecisionRecord(
            op=decision.op or "WAIT",
            slot=decision.slot,
            blueprint=decision.blueprint,
            style=decision.style,
            tempo=decision.tempo,
            alpha_target=decision.alpha_target,
            alpha_speed=decision.alpha_speed,
            alpha_curve=decision.alpha_curve,
            outcome=decision.outcome or "done",
            reason=decision.reason or "",
        )
    history = []
    for epoch in run.records("epochs"):
        assert isinstance(epoch, EpochRow)
        found = stages.get(epoch.step, {})
        slots = tuple(found.get(name) or _empty_slot(name) for name in names or sorted(found))
        history.append(
            EpochRecord(
                epoch=epoch.step,
                train_loss=epoch.train_loss,
                val_loss=_number(epoch.val_loss),
                val_score=_number(epoch.val_score),
                twin_score=epoch.twin_score,
                stabilized=bool(epoch.stabilized),
                plateau_epochs=epoch.plateau_epochs or 0,
                parameters=epoch.parameters or 0,
                slots=slots,
                decision=decisions.get(epoch.step),
                seconds=epoch.seconds or 0.0,
            )
        )
    return history


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _empty_slot(name: str) -> SlotRecord:
    return SlotRecord(
        name=name,
        stage=SeedStage.DORMANT.name,
        blueprint=None,
        alpha=0.0,
        alpha_target=0.0,
        parameters=0,
        epochs_in_stage=0,
        age=0,
        contribution=None,
        contribution_se=None,
    )
