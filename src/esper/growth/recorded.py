"""A growing run in its folder.

    grown = esper.grow(model, slots, train=..., val=..., out="runs/mine", resume=True)

A checkpoint is saved between epochs, at most every two seconds, and at the end. `checkpoints/best`
is the network with the best validation score so far, for `esper.load_garden`. The checkpoint holds
it too, so a continued run returns it bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from esper.growth.batches import generators_of
from esper.growth.depth.gardener import GROWN
from esper.growth.grown import Format, Grown
from esper.growth.recorder import (
    EpochRecorder,
    record_changes,
    record_end,
    record_history,
    record_start,
    run_row,
)
from esper.growth.request import STARTED_BY, GrowRequest
from esper.growth.run import GrowthLoop
from esper.kasmina.contribution import Contributions, Estimate
from esper.leyline.errors import UsageError
from esper.leyline.reasons import describe_kept, epoch_line
from esper.leyline.records import EpochRecord
from esper.nissa.database import STORE_FILE
from esper.nissa.folder import GROWING, Checkpoints, RunFolder, Which, Write, resume_command
from esper.nissa.recorded import RecordedRun, RunInputs
from esper.nissa.report import report_run
from esper.nissa.sinks import DEFAULT_SINKS, Sink, check_sinks
from esper.nissa.store import OnAlarm, RunStore, open_store
from esper.utils.manifest import restoring
from esper.utils.randomness import random_states, restore_random_states
from esper.utils.settings import SettingChanges

SAVE_EVERY_S = 2.0
"""Least seconds between two checkpoints."""


class RecordedGrowth(RecordedRun[EpochRecord]):
    """A growing run that is open for writing; made by `open_growth`.

    Args:
        folder: the run folder.
        growth: the loop, in the state to continue from.
        store: where epochs are recorded.
        command: the command that started the run.
        inputs: checksums of its data, model and functions.
        settings: the content of `config.yaml`.
        generators: those that the training batches draw from, beside the global ones.
        is_saved: whether the newest checkpoint holds the state to continue from.
    """

    kind = GROWING

    def __init__(
        self,
        folder: RunFolder,
        growth: GrowthLoop,
        store: RunStore,
        command: str,
        inputs: RunInputs,
        settings: Mapping[str, Any],
        *,
        generators: Sequence[torch.Generator] = (),
        is_saved: bool = False,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        super().__init__(
            folder, store, command, inputs, save_every_s=SAVE_EVERY_S, is_saved=is_saved
        )
        self.growth = growth
        self._recorder = EpochRecorder(store, growth)
        self.settings = settings
        self._generators = generators
        # The first epoch is always saved.
        self._saved_at = -math.inf
        self.saved_epoch = growth.gardener.epoch if is_saved else 0
        """The last epoch that is saved; 0 before the first."""
        if growth.best.epoch:
            # The folder may hold the best network of a later checkpoint than this one.
            self._best = self._write_best()

    def steps(self) -> Iterator[EpochRecord]:
        """Train, measure and decide, epoch by epoch."""
        return self.growth.epochs()

    @property
    def is_done(self) -> bool:
        """Whether all epochs are trained."""
        return self.growth.is_done

    def is_due(self, step: EpochRecord) -> bool:
        """Return whether to save a checkpoint after an epoch."""
        return self.is_done or super().is_due(step)

    def record(self, step: EpochRecord) -> None:
        """Write an epoch into the store and the log."""
        self._recorder.record(step)
        anew = ""
        if step.statistics_samples:
            anew = f"  BatchNorm statistics from {step.statistics_samples} samples"
        self.folder.log(f"epoch {step.epoch} {epoch_line(step)}{anew}")

    def best(self, step: EpochRecord) -> Write | None:
        """Return what writes the network of this epoch, if it is the best so far."""
        return self._write_best() if self.growth.best.epoch == step.epoch else None

    def _write_best(self) -> Write:
        garden, best = self.growth.garden, self.growth.best

        def write(folder: Path) -> None:
            garden.save(folder, state=best.weights, epoch=best.epoch)

        return write

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state and the content of its manifest."""
        growth = self.growth
        # The order of a shuffled `DataLoader` and augmentations are drawn from the user's own.
        order = random_states(self._generators)
        state = {**growth.state_dict(), "settings": dict(self.settings), "random": order}
        meta = {
            "task": growth.name,
            "controller": growth.controller_name,
            "seed": growth.config.seed,
            "epoch": growth.gardener.epoch,
            "epochs": growth.config.epochs,
            "best_score": growth.best.score,
        }
        return state, meta, {}

    def save(self) -> None:
        """Save the best result so far, then a checkpoint."""
        super().save()
        self.saved_epoch = self.growth.gardener.epoch

    def describe_stop(self) -> str:
        """Return what happens before the run stops, as text."""
        epoch = self.growth.gardener.epoch
        is_done = self.is_between_steps
        return f"saving epoch {epoch}" if is_done else f"finishing epoch {epoch + 1}, then saving"

    def record_stop(self) -> str:
        """Record that the run stops early; return after which epoch, as text."""
        self.store.finish("interrupted", seconds=self.growth.seconds)
        return f"after epoch {self.growth.gardener.epoch}"

    def finish(self, export: Format | None = None) -> tuple[Grown, dict[str, Any]]:
        """Write the results of a finished run; return the grown network and the summary."""
        self.store.check_in_place()
        path = self.folder.path
        grown = dataclasses.replace(self.growth.finish(), folder=path)
        self.folder.log(f"result: {describe_kept(grown.summary)}")
        grown.save(path / GROWN)
        record_end(self.store, grown)
        report = report_run(path)
        exported = None
        if export is not None:
            exported = grown.export(path / f"grown.{export}")
        summary = {
            **grown.summary.to_mapping(),
            "why": list(grown.why),
            "static_warning": grown.static_warning,
            "val_gain": None if grown.val_gain is None else dataclasses.asdict(grown.val_gain),
            "best_by_size": [dataclasses.asdict(size) for size in grown.best_by_size],
            "contributions": describe_contributions(grown.contributions),
            "run": str(path),
            "report": str(report),
            "exported": None if exported is None else str(exported),
        }
        self.folder.finish(summary)
        return grown, summary


def open_growth(
    request: GrowRequest,
    path: str | Path,
    *,
    resume: Which | None = None,
    overwrite: bool = False,
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> RecordedGrowth:
    """Open a run folder to grow a network in it; nothing is trained yet.

    Args:
        request: what to grow; to continue a run, the same as at its start, except for `CHANGEABLE`
            settings.
        path: the run folder.
        resume: the checkpoint to continue from, or from the start if there is none; by default a
            new run.
        overwrite: replace the run in the folder.
        command: the command that started the run, if no checkpoint holds it.
        sinks: where to show records beside the store.
        on_alarm: called with every alarm.

    Raises:
        UsageError: The folder is in use or of another kind; the run has another model, other data
            or another controller than before; a setting must not change.
        CheckpointError: The checkpoint is damaged or foreign, or another process writes the run.
    """
    check_sinks(sinks)
    folder = RunFolder(path)
    store_of = partial(open_store, folder.path, sinks=sinks, on_alarm=on_alarm)
    if resume is not None:
        with folder.claim_run() as lock:
            return _open_again(request, folder, partial(store_of, lock=lock), resume, command)
    # A wrong request must not replace an existing run.
    growth = GrowthLoop(request)
    inputs = request.inputs(growth.example_input)
    with folder.claim_new(request.settings, overwrite=overwrite) as lock:
        folder.log(f"started: {command}" if command else "started")
        row = run_row(growth, folder.path, request.settings, command)
        store = store_of(row, lock=lock)
        record_start(store, growth)
        generators = generators_of(request.train)
        return RecordedGrowth(
            folder, growth, store, command, inputs, request.settings, generators=generators
        )


def _open_again(
    request: GrowRequest,
    folder: RunFolder,
    store_of: Callable[..., RunStore],
    which: Which,
    command: str,
) -> RecordedGrowth:
    """Put a run into the state of a checkpoint and open its store."""
    _refuse_other_program(folder, request.settings)
    checkpoints = Checkpoints(folder.path, GROWING)
    state = checkpoints.load(which)
    place = checkpoints.folder / which
    changes, versions, mark = SettingChanges(), {}, None
    generators = generators_of(request.train)
    if state is not None:
        with restoring(place):
            # Those of the checkpoint, because the file in the folder may be edited.
            changes = request.changes_since(dict(state["settings"]))
    growth = GrowthLoop(request)
    inputs = request.inputs(growth.example_input)
    if state is not None:
        with restoring(place):
            renewed = {*changes.settings, *request.renewed}
            versions = inputs.differences(folder.path, state["world"], renewed)
            if "controller" in renewed:
                # Another controller starts without memory.
                state["gardener"]["controller"] = growth.gardener.controller.state_dict()
            growth.load_state_dict(state)
            restore_random_states(state["random"], generators)
            command = str(state["command"])
            _refuse_fewer_epochs(folder.path, growth)
            # Without a mark, or without its store, everything is recorded again.
            if (folder.path / STORE_FILE).exists():
                mark = state["telemetry"]
    row = run_row(growth, folder.path, request.settings, command)
    store = store_of(row, resume=True if mark is None else mark)
    if mark is None:
        record_start(store, growth)
        record_history(store, growth)
    is_saved = state is not None and which == "latest"
    run = RecordedGrowth(
        folder,
        growth,
        store,
        command,
        inputs,
        request.settings,
        generators=generators,
        is_saved=is_saved,
    )
    run.warn_of_other_versions(versions)
    if changes:
        record_changes(store, growth, changes)
        folder.log(f"changed: {changes.describe()}")
        # Saved at once, so that the next resume sees it as unchanged.
        run.save()
    if request.settings != folder.read_config():
        folder.write_config(request.settings)
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


def _refuse_other_program(folder: RunFolder, settings: Mapping[str, Any]) -> None:
    function = settings.get(STARTED_BY)
    if folder.read_config().get(STARTED_BY) != function:
        raise UsageError(
            f"{folder.path} was not started by {function}; continue it by "
            f"{resume_command(folder.path, GROWING)}"
        )


def _refuse_fewer_epochs(path: Path, growth: GrowthLoop) -> None:
    done, asked = growth.gardener.epoch, growth.config.epochs
    if asked < done:
        raise UsageError(
            f"{path} has already trained {done} epochs, more than epochs={asked}; write "
            f"epochs={done} or more"
        )
