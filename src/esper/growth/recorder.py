"""Records a growing run in its store: the run itself, its host, every epoch and its end.

Everything but times and memory depends only on the run, so a resumed run leaves the same records
as an uninterrupted one. `esper.nissa.history` reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.growth.grown import Grown, describe_host
from esper.growth.run import GrowthLoop
from esper.kasmina.contribution import Contributions, Estimate
from esper.leyline.controller import Controller
from esper.leyline.records import (
    EpochRecord,
    SeedLives,
    SeedRecord,
    copy_fields,
    kept_record,
    seed_records,
)
from esper.leyline.stages import MODULE_STAGES, SeedStage
from esper.nissa.columns import Row
from esper.nissa.schema import (
    ContributionRow,
    DecisionRow,
    EpochRow,
    EventKind,
    EventRow,
    SeedRow,
    StackRow,
    StageRow,
)
from esper.nissa.schema_runs import RunRow
from esper.nissa.store import RunStore
from esper.tamiyo.controllers.learned import LearnedController
from esper.utils.process import gpu_memory_share, resident_bytes, software_versions
from esper.utils.settings import SettingChanges

_EMPTY = (SeedStage.DORMANT.name, SeedStage.UNKNOWN.name)
_MEASURED = (SeedStage.BLENDING.name, SeedStage.HOLDING.name)
_WITH_MODULE = tuple(stage.name for stage in MODULE_STAGES)


def run_row(run: GrowthLoop, folder: Path, config: Mapping[str, Any], command: str) -> RunRow:
    """Return the row of a run that begins."""
    return RunRow(
        kind="grow",
        name=folder.absolute().name,
        task=run.name,
        controller=run.controller_name,
        seed=run.config.seed,
        device=run.device.type,
        rows=1,
        epochs=run.config.epochs,
        slots=list(run.garden.slot_names),
        host_parameters=run.parameters_before,
        host_flops=run.flops_before,
        config=config,
        command=command,
        versions=software_versions(),
    )


def record_start(store: RunStore, run: GrowthLoop) -> None:
    """Record the parts of the host, which a report draws."""
    modules = () if run.depth else describe_host(run.garden, run.example_input)
    data: dict[str, Any] = {"modules": [module.to_mapping() for module in modules]}
    if run.budget is not None:
        data["compute_budget"] = run.budget.flops
    store.event(EventKind.TRAINING_STARTED, "the host before growth", data=data)


def record_changes(store: RunStore, run: GrowthLoop, changes: SettingChanges) -> None:
    """Record changed settings."""
    store.event(
        EventKind.SETTINGS_CHANGED,
        changes.describe(),
        step=run.gardener.epoch,
        severity="warning",
        data={"settings": {key: [old, new] for key, (old, new) in changes.settings.items()}},
    )


def record_history(store: RunStore, run: GrowthLoop) -> None:
    """Record all epochs so far in an empty store."""
    rows = _epoch_rows(run, ())
    for record in run.history:
        store.write(*rows.of(record))


class EpochRecorder:
    """Records the epochs of a run, after those of its history."""

    def __init__(self, store: RunStore, run: GrowthLoop) -> None:
        """Continue after the run's history."""
        self._store = store
        self._run = run
        self._rows = _epoch_rows(run, run.history)

    def record(self, epoch: EpochRecord) -> None:
        """Record the epoch that was just finished, in one transaction."""
        run = self._run
        self._store.write(
            *_explanation_rows(epoch, run.gardener.controller),
            *self._rows.of(
                epoch,
                memory_bytes=resident_bytes(),
                gpu_memory_share=gpu_memory_share(run.device),
            ),
        )


def _explanation_rows(epoch: EpochRecord, controller: Controller) -> Iterator[Row]:
    """Return why a learned controller decided as it did; only now it can tell."""
    if epoch.decision is None or not isinstance(controller, LearnedController):
        return
    if controller.decides():
        yield EventRow(
            step=epoch.epoch,
            # A history that is recorded again after a lost store has none.
            volatile=True,
            kind=EventKind.DECISION_EXPLAINED,
            severity="debug",
            message=f"why {epoch.decision.op} was chosen",
            data=controller.explain().to_mapping(),
        )


def _epoch_rows(run: GrowthLoop, history: Iterable[EpochRecord]) -> EpochRows:
    return EpochRows(
        history,
        host_parameters=run.parameters_before,
        host_flops=run.flops_before,
        ablate_every=run.config.gardener.ablate_every,
    )


def record_end(store: RunStore, grown: Grown) -> None:
    """Record how the run ended and what every seed contributed then."""
    summary = grown.summary
    rows: list[Row] = list(_final_contributions(grown))
    scores = {one.epoch: one.val_score for one in grown.history}
    # The kept network may be of an earlier epoch than the last recorded one.
    for ordinal, (seed, told) in enumerate(
        zip(summary.seeds, seed_records(grown.history), strict=True)
    ):
        if seed != told:
            until = summary.kept_epoch if seed.ended is None else seed.ended
            gained = scores[until] - scores[seed.germinated]
            rows.append(copy_fields(SeedRow, seed, ordinal=ordinal, improvement=gained))
    if rows:
        store.write(*rows)
    store.finish(
        "finished",
        val_score=summary.val_score,
        test_score=summary.test_score,
        twin_val_score=summary.twin_val_score,
        twin_test_score=summary.twin_test_score,
        parameters=summary.parameters_after,
        flops=summary.flops_after,
        seconds=summary.seconds,
        kept_epoch=summary.kept_epoch,
        twin_kept_epoch=summary.twin_kept_epoch,
        stopped=summary.stopped or None,
    )


def _final_contributions(grown: Grown) -> Iterator[ContributionRow]:
    """Return the last measurement, of the kept network, without what its epoch recorded."""
    kept = kept_record(grown.history, grown.summary.kept_epoch)
    told = {
        slot.name
        for slot in kept.slots
        if slot.contribution is not None and slot.stage in ("BLENDING", "HOLDING")
    }

    def row(kind: str, found: Estimate, slot: str | None = None, other: str | None = None) -> Any:
        return ContributionRow(
            step=kept.epoch, kind=kind, slot=slot, other=other, value=found.value, se=found.se
        )

    result: Contributions = grown.contributions
    if not result.leave_one_out:
        return
    yield row("all_off", result.all_off)
    for slot, found in result.leave_one_out.items():
        if slot not in told:
            yield row("leave_one_out", found, slot)
    for kind, single in (("solo_on", result.solo_on), ("shapley", result.shapley)):
        for slot, found in single.items():
            yield row(kind, found, slot)
    for kind, pairs in (("pair", result.pairs), ("interaction", result.interactions)):
        for (slot, other), found in pairs.items():
            yield row(kind, found, slot, other)


# ---- One epoch


class EpochRows:
    """Turns the epochs of a run into rows, one after another.

    It remembers what an epoch is compared with, so the thousandth costs no more than the first.

    Args:
        history: Epochs that came before, in order.
        host_parameters: Trainable parameters before growth.
        host_flops: Operations of one sample's forward pass before growth.
        ablate_every: Contributions were measured at every this many epochs.
    """

    def __init__(
        self,
        history: Iterable[EpochRecord] = (),
        *,
        host_parameters: int | None = None,
        host_flops: int | None = None,
        ablate_every: int = 1,
    ) -> None:
        """Begin after `history`."""
        self._host = {"host_parameters": host_parameters, "host_flops": host_flops}
        self._ablate_every = ablate_every
        self._before: EpochRecord | None = None
        self._lives = SeedLives()
        self._scores: dict[int, float] = {}
        self._best: float | None = None
        for record in history:
            self._follow(record)
        self._seeds = self._lives.records()

    def _follow(self, record: EpochRecord) -> None:
        self._before = record
        self._lives.follow(record)
        self._scores[record.epoch] = record.val_score
        score = record.val_score
        self._best = score if self._best is None else max(self._best, score)

    def of(self, record: EpochRecord, **columns: Any) -> list[Row]:
        """Return the rows of the next epoch; that of the epoch itself comes last.

        Args:
            record: The epoch.
            columns: Further columns of `epochs`, such as `memory_bytes`.
        """
        before, earlier, scores = self._before, self._seeds, self._scores
        self._follow(record)
        seeds = self._seeds = self._lives.records()
        return [
            *_stage_rows(record, before, seeds, scores),
            *_contribution_rows(record, self._ablate_every),
            *_seed_rows(record, seeds, earlier, scores),
            *_decision_rows(record),
            *_stack_rows(record),
            *_event_rows(record, before, seeds, earlier),
            copy_fields(
                EpochRow,
                record,
                step=record.epoch,
                best_score=self._best,
                live_seeds=sum(slot.stage in _WITH_MODULE for slot in record.slots),
                rollback_reason=record.rollback,
                **_training_columns(record),
                **self._host,
                **columns,
            ),
        ]


def _stage_rows(
    record: EpochRecord,
    before: EpochRecord | None,
    seeds: Sequence[SeedRecord],
    scores: Mapping[int, float],
) -> Iterator[Row]:
    previous = {slot.name: slot.stage for slot in before.slots} if before else {}
    # The last seed of a slot is the one in it; a pruned one only cools down.
    living = {seed.slot: seed for seed in seeds if seed.fate != "pruned"}
    for index, slot in enumerate(record.slots):
        if slot.stage in _EMPTY and slot.blueprint is None:
            continue
        seed = living.get(slot.name)
        yield copy_fields(
            StageRow,
            slot,
            step=record.epoch,
            ordinal=index,
            slot=slot.name,
            entered=previous.get(slot.name) != slot.stage,
            improvement=None if seed is None else record.val_score - scores[seed.germinated],
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


def _seed_rows(
    record: EpochRecord,
    seeds: Sequence[SeedRecord],
    earlier: Sequence[SeedRecord],
    scores: Mapping[int, float],
) -> Iterator[Row]:
    for ordinal, seed in enumerate(seeds):
        if seed.ended is None or ordinal >= len(earlier) or earlier[ordinal] != seed:
            until = record.epoch if seed.ended is None else seed.ended
            improvement = scores[until] - scores[seed.germinated]
            yield copy_fields(SeedRow, seed, ordinal=ordinal, improvement=improvement)


def _decision_rows(record: EpochRecord) -> Iterator[Row]:
    woken = () if record.depth is None else record.depth.deepenings
    for ordinal, decision in enumerate(record.decisions):
        took_effect = decision.outcome == "done"
        blocks: dict[str, Any] = {}
        if woken:
            one = woken[ordinal]
            blocks = {
                "blocks_before": one.before,
                "blocks_after": one.after,
                "training_step": one.step,
            }
        yield copy_fields(
            DecisionRow,
            decision,
            step=record.epoch,
            ordinal=ordinal,
            took_effect=took_effect,
            effective_op=decision.op if took_effect else "WAIT",
            **blocks,
        )


def _stack_rows(record: EpochRecord) -> Iterator[Row]:
    stacks = () if record.depth is None else record.depth.stacks
    for ordinal, stack in enumerate(stacks):
        yield copy_fields(StackRow, stack, step=record.epoch, ordinal=ordinal, stack=stack.name)


def _training_columns(record: EpochRecord) -> dict[str, Any]:
    depth = record.depth
    if depth is None:
        return {}
    return {"training_steps": depth.step, "static_flops": depth.static_flops}


def _event_rows(
    record: EpochRecord,
    before: EpochRecord | None,
    seeds: Sequence[SeedRecord],
    earlier: Sequence[SeedRecord],
) -> Iterator[Row]:
    def event(kind: EventKind, message: str, slot: str | None = None) -> Row:
        return EventRow(step=record.epoch, kind=kind, message=message, slot=slot)

    woken = () if record.depth is None else record.depth.deepenings
    for one in woken:
        if one.outcome == "done":
            yield event(EventKind.BLOCKS_WOKEN, f"{one.stack}: {one.reason}", one.stack)
    if record.rollback is not None:
        yield event(EventKind.GOVERNOR_ROLLBACK, f"back to the last good state: {record.rollback}")
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
