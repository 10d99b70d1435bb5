"""A growing run in its folder, and `esper.grow`: a network of your own, grown in one call.

    grown = esper.grow(model, slots, train=..., val=..., out="runs/mine", resume=True)

A checkpoint is saved every few seconds, between epochs, and at the end. `checkpoints/best` is the
network with the best validation score so far, for `esper.load_garden`. The checkpoint has it too:
a run that is continued returns it bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from esper.growth.depth.gardener import GROWN
from esper.growth.grown import Format, Grown
from esper.growth.recorder import (
    EpochRecorder,
    record_changes,
    record_end,
    record_history,
    record_interruption,
    record_start,
    run_row,
)
from esper.growth.run import GrowthRun
from esper.kasmina.contribution import Contributions, Estimate
from esper.leyline.errors import UsageError
from esper.leyline.records import EpochRecord, epoch_line, told_kept
from esper.nissa.database import STORE_FILE
from esper.nissa.folder import GROWING, Checkpoints, RunFolder, Which, Write
from esper.nissa.recorded import RecordedRun, World
from esper.nissa.report import report_run
from esper.nissa.sinks import Sink, check_sinks
from esper.nissa.store import DEFAULT_SINKS, OnAlarm, RunStore, open_store
from esper.utils.files import WriterLock
from esper.utils.manifest import restoring
from esper.utils.settings import SettingChanges, changed_settings

STARTED_BY = "started_by"
"""Key in the settings of a run that only a program can continue, with the function it called."""

SAVE_EVERY_S = 2.0
"""Least time from one checkpoint to the next."""

Shapes = dict[str, list[int]]


class GrowingRun(RecordedRun[EpochRecord]):
    """A growing run that is open for writing; made by `start_growing` and `resume_growing`.

    Args:
        folder: where it lies.
        growth: what is grown, in the state to go on from.
        store: where it is written down.
        command: the command that started it.
        world: what it stands on beside its settings.
        settings: what `config.yaml` says.
        shapes: of the host's weights before it grew.
        is_saved: whether the newest checkpoint holds the state to go on from.
    """

    kind = GROWING

    def __init__(
        self,
        folder: RunFolder,
        growth: GrowthRun,
        store: RunStore,
        command: str,
        world: World,
        settings: Mapping[str, Any],
        shapes: Shapes,
        *,
        is_saved: bool = False,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        super().__init__(
            folder, store, command, world, save_every_s=SAVE_EVERY_S, is_saved=is_saved
        )
        self.growth = growth
        self._recorder = EpochRecorder(store, growth)
        self.settings = settings
        # Whatever an epoch takes, the first is saved.
        self._saved_at = -math.inf
        self._shapes = shapes
        self._saved_best = 0
        """The epoch whose network `checkpoints/best` has, as far as this process has saved it."""

    def steps(self) -> Iterator[EpochRecord]:
        """Train, measure and decide, one epoch after another."""
        return self.growth.epochs()

    @property
    def is_done(self) -> bool:
        """Whether all epochs are trained."""
        return self.growth.is_done

    def is_due(self, step: EpochRecord) -> bool:
        """Return whether a checkpoint is to be saved after an epoch."""
        return self.is_done or super().is_due(step)

    def record(self, step: EpochRecord) -> None:
        """Write an epoch into the store and the log."""
        self._recorder.record_newest()
        anew = ""
        if step.statistics_samples:
            anew = f"  BatchNorm statistics from {step.statistics_samples} samples"
        self.folder.log(f"epoch {step.epoch} {epoch_line(step)}{anew}")

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state and what its manifest says; the best network is saved first."""
        growth = self.growth
        best = growth.best
        if best.epoch != self._saved_best:
            growth.garden.save(self.checkpoints.best, state=best.weights, epoch=best.epoch)
            self._saved_best = best.epoch
        state = {
            **growth.state_dict(),
            "settings": dict(self.settings),
            "shapes": self._shapes,
        }
        meta = {
            "task": growth.name,
            "controller": growth.controller_name,
            "seed": growth.config.seed,
            "epoch": growth.gardener.epoch,
            "epochs": growth.config.epochs,
            "best_score": best.score,
        }
        return state, meta, {}

    def record_stop(self) -> str:
        """Write down that the run stops before its end; return where it stopped, in words."""
        record_interruption(self.store, self.growth)
        return f"after epoch {self.growth.gardener.epoch}"

    def finish(self, export: Format | None = None) -> tuple[Grown, dict[str, Any]]:
        """Write what a finished run leaves behind; return what was grown, and its summary."""
        self.store.check_in_place()
        path = self.folder.path
        grown = dataclasses.replace(self.growth.finish(), folder=path)
        self.folder.log(f"result: {told_kept(grown.summary)}")
        grown.save(path / GROWN)
        record_end(self.store, grown)
        report = report_run(path)
        exported = None
        if export is not None:
            exported = grown.export(path / f"grown.{export}")
        summary = {
            **grown.summary.to_mapping(),
            "why": list(grown.why),
            "best_by_size": [dataclasses.asdict(size) for size in grown.best_by_size],
            "contributions": describe_contributions(grown.contributions),
            "run": str(path),
            "report": str(report),
            "exported": None if exported is None else str(exported),
        }
        self.folder.finish(summary)
        return grown, summary


def start_growing(
    path: str | Path,
    growth: GrowthRun,
    settings: Mapping[str, Any],
    world: World,
    *,
    overwrite: bool = False,
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> GrowingRun:
    """Create a run folder and open it; nothing is trained yet.

    Args:
        path: the run folder.
        growth: what is grown.
        settings: what `config.yaml` says.
        world: what the run stands on beside its settings.
        overwrite: replace a run that is there.
        command: the command that started it.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.
    """
    check_sinks(sinks)
    folder = RunFolder(path)
    with folder.claim_new(settings, overwrite=overwrite) as lock:
        folder.log(f"started: {command}" if command else "started")
        row = run_row(growth, folder.path, settings, command)
        store = open_store(folder.path, row, sinks=sinks, on_alarm=on_alarm, lock=lock)
        record_start(store, growth)
        return GrowingRun(folder, growth, store, command, world, settings, shapes_of(growth))


def resume_growing(
    path: str | Path,
    growth: GrowthRun,
    settings: Mapping[str, Any],
    world: World,
    *,
    checkpoint: Which = "latest",
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> GrowingRun:
    """Open a run to go on exactly from its last checkpoint, or from its beginning without one.

    Args:
        path: the run folder.
        growth: the run, made as it was when it was started.
        settings: what `config.yaml` is to say; the caller has refused what cannot change.
        world: what the run stands on beside its settings.
        checkpoint: which checkpoint to go on from.
        command: the command that started it, where no checkpoint says so.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.

    Raises:
        UsageError: The run was started with another model, or on other data.
        CheckpointError: The checkpoint is damaged or foreign, or another process writes the run.
    """
    check_sinks(sinks)
    folder = RunFolder(path)
    with folder.claim_run() as lock:
        state = Checkpoints(folder.path, GROWING).load(checkpoint)
        changes = SettingChanges()
        if state is not None:
            with restoring(Checkpoints(folder.path, GROWING).folder / checkpoint):
                changes = SettingChanges(changed_settings(dict(state["settings"]), settings))
        opening = Opening(lock, checkpoint, command, sinks, on_alarm)
        run = reopen(folder, growth, settings, world, state, opening, set(changes.settings))
        take_changes(run, changes)
        if settings != folder.read_config():
            folder.write_config(settings)
        return run


def take_changes(run: GrowingRun, changes: SettingChanges) -> None:
    """Write down what is different from here on; whoever continues after this has it."""
    if changes:
        record_changes(run.store, run.growth, changes)
        run.folder.log(f"changed: {changes.describe()}")
        run.save()


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """How a run is opened again."""

    lock: WriterLock
    checkpoint: Which
    command: str
    sinks: Iterable[str | Sink]
    on_alarm: OnAlarm | None


def reopen(
    folder: RunFolder,
    growth: GrowthRun,
    settings: Mapping[str, Any],
    world: World,
    state: dict[str, Any] | None,
    opening: Opening,
    changed: Collection[str],
) -> GrowingRun:
    """Put a run into the state of a checkpoint and open its store."""
    shapes, command, versions = shapes_of(growth), opening.command, {}
    mark = None
    if state is not None:
        with restoring(Checkpoints(folder.path, GROWING).folder / opening.checkpoint):
            _refuse_other_model(folder.path, shapes, state["shapes"])
            versions = world.differences(folder.path, state["world"], changed)
            if state["gardener"]["controller"] is None:
                # Another controller knows nothing of what this one has seen.
                state["gardener"]["controller"] = growth.gardener.controller.state_dict()
            growth.load_state_dict(state)
            command = str(state["command"])
            _refuse_fewer_epochs(folder.path, growth)
            # Without a mark, or without the store it speaks of, everything is written down anew.
            if (folder.path / STORE_FILE).exists():
                mark = state["telemetry"]
    store = open_store(
        folder.path,
        run_row(growth, folder.path, settings, command),
        resume=True if mark is None else mark,
        sinks=opening.sinks,
        on_alarm=opening.on_alarm,
        lock=opening.lock,
    )
    if mark is None:
        record_start(store, growth)
        record_history(store, growth)
    run = GrowingRun(
        folder,
        growth,
        store,
        command,
        world,
        settings,
        shapes,
        is_saved=state is not None and opening.checkpoint == "latest",
    )
    run.tell_versions(versions)
    return run


def describe_contributions(result: Contributions) -> dict[str, Any]:
    """Return measured contributions as plain data."""

    def plain(estimates: Mapping[Any, Estimate]) -> dict[str, Any]:
        return {
            " + ".join(key) if isinstance(key, tuple) else key: dataclasses.asdict(estimate)
            for key, estimate in estimates.items()
        }

    measured = ("leave_one_out", "solo_on", "pairs", "interactions", "shapley")
    told = {name: plain(getattr(result, name)) for name in measured}
    return {"all_off": dataclasses.asdict(result.all_off), **told}


def shapes_of(growth: GrowthRun) -> Shapes:
    """Return the shape of every weight of a host that has not grown yet."""
    weights = growth.garden.model.state_dict()
    return {name: list(value.shape) for name, value in weights.items() if hasattr(value, "shape")}


def _refuse_other_model(path: Path, own: Shapes, saved: Shapes) -> None:
    for name in {**saved, **own}:
        if own.get(name) != saved.get(name):
            there, here = (shapes.get(name, "missing") for shapes in (saved, own))
            raise UsageError(
                f"{path} was started with another model: its {name} is {there} there and {here} "
                "here; continue it with the model it was started with"
            )


def _refuse_fewer_epochs(path: Path, growth: GrowthRun) -> None:
    done, asked = growth.gardener.epoch, growth.config.epochs
    if asked < done:
        raise UsageError(
            f"growth.epochs cannot become {asked}: {done} epochs of {path} are trained already; "
            f"give at least {done}"
        )
