"""A growing run in its folder, and `esper.grow`: a network of your own, grown in one call.

    grown = esper.grow(model, slots, train=..., val=..., out="runs/mine", resume=True)

A checkpoint is saved every few seconds, between epochs, and at the end. `checkpoints/best` is the
network with the best validation score so far, for `esper.load_garden`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.batches import Batches
from esper.growth.build import model_run
from esper.growth.criterion import Loss
from esper.growth.gardener import DEFAULT_CONTROLLER
from esper.growth.grown import Format, Grown, export_model
from esper.growth.optimization import OptimizerFactory
from esper.growth.run import GrowthConfig, GrowthRun
from esper.kasmina.contribution import Contributions
from esper.kasmina.placement import DeclaredAxes, SlotNames, slot_paths
from esper.kasmina.trainee import SchedulerEvery, SchedulerFactory
from esper.leyline.controller import Controller
from esper.leyline.errors import EsperWarning, UsageError
from esper.leyline.files import atomic_write_text
from esper.leyline.lock import WriterLock
from esper.leyline.manifest import restoring
from esper.leyline.records import EpochRecord, epoch_line
from esper.leyline.settings import SettingChanges, change_settings, changed_settings
from esper.nissa.database import STORE_FILE
from esper.nissa.schema import RunRow
from esper.nissa.sinks.sink import Sink
from esper.nissa.store import DEFAULT_SINKS, OnAlarm, RunStore, open_store
from esper.report import report_run
from esper.runs.checkpoint import GROWING, Checkpoints, Which, Write, resume_command
from esper.runs.folder import RunFolder
from esper.runs.record_growing import (
    record_changes,
    record_end,
    record_history,
    record_interruption,
    record_newest,
    record_start,
    run_row,
)
from esper.runs.recorded import RecordedRun, carry_out_or_raise
from esper.runs.request import STARTED_BY, compare_requests, read_request, refuse_code
from esper.runs.world import World, batch_fingerprint

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
        best_score: the best validation score so far.
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
        best_score: float = -math.inf,
        is_saved: bool = False,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        super().__init__(
            folder, store, command, world, save_every_s=SAVE_EVERY_S, is_saved=is_saved
        )
        self.growth = growth
        self.settings = settings
        # Whatever an epoch takes, the first is saved.
        self._saved_at = -math.inf
        self._shapes = shapes
        self._best_score = best_score
        self._best: tuple[dict[str, Any], int] | None = None
        """The best network and its epoch, where it is not saved yet."""

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
        """Write an epoch into the store and the log, and keep the network if it is the best."""
        record_newest(self.store, self.growth)
        self.folder.log(f"epoch {step.epoch} {epoch_line(step)}")
        if step.val_score > self._best_score:
            self._best_score = step.val_score
            weights = self.growth.garden.state_dict()
            self._best = {name: _copy(value) for name, value in weights.items()}, step.epoch

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state and what its manifest says; the best network is saved first."""
        growth = self.growth
        if self._best is not None:
            weights, epoch = self._best
            growth.garden.save(self.checkpoints.best, state=weights, epoch=epoch)
            self._best = None
        state = {
            **growth.state_dict(),
            "settings": dict(self.settings),
            "shapes": self._shapes,
            "best_score": self._best_score,
        }
        meta = {
            "task": growth.name,
            "controller": growth.controller_name,
            "seed": growth.config.seed,
            "epoch": growth.gardener.epoch,
            "epochs": growth.config.epochs,
            "best_score": self._best_score,
        }
        return state, meta, {}

    def record_stop(self) -> str:
        """Write down that the run stops before its end; return where it stopped, in words."""
        record_interruption(self.store, self.growth)
        return f"after epoch {self.growth.gardener.epoch}"

    def finish(self, export: Format | None = None) -> tuple[Grown, dict[str, Any]]:
        """Write what a finished run leaves behind; return what was grown, and its summary."""
        path = self.folder.path
        grown = dataclasses.replace(self.growth.finish(), folder=path)
        grown.model.save(path / "grown")
        record_end(self.store, grown)
        report = report_run(path)
        exported = None
        if export is not None:
            example = self.growth.example_input
            exported = export_model(grown.model, example, path / f"grown.{export}", export)
        summary = {
            **grown.summary.to_mapping(),
            "why": list(grown.why),
            "contributions": describe_contributions(grown.contributions),
            "run": str(path),
            "report": str(report),
            "exported": None if exported is None else str(exported),
        }
        atomic_write_text(path / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.folder.log("finished")
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
    folder = RunFolder(path)
    with folder.claim_new(settings, overwrite=overwrite) as lock:
        folder.log(f"started: {command}" if command else "started")
        row = _row(folder, growth, settings, command)
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
        settings: what `config.yaml` says.
        world: what the run stands on beside its settings.
        checkpoint: which checkpoint to go on from.
        command: the command that started it, where no checkpoint says so.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.

    Raises:
        UsageError: The run was started with another model, or on other data.
        CheckpointError: The checkpoint is damaged or foreign, or another process writes the run.
    """
    folder = RunFolder(path)
    with folder.claim_run() as lock:
        state = Checkpoints(folder.path, GROWING).load(checkpoint)
        opening = _Opening(lock, checkpoint, command, sinks, on_alarm)
        return _reopen(folder, growth, settings, world, state, opening, set())


def resume_request(
    path: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    model: str | None = None,
    checkpoint: Which = "latest",
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> GrowingRun:
    """Open what `esper grow` started, to go on from its last checkpoint.

    Args:
        path: the run folder.
        settings: changes by dotted key, of those that `CHANGEABLE` names.
        model: MODULE:FACTORY, for a run of somebody's own model; a folder alone runs no code.
        checkpoint: which checkpoint to go on from.
        command: the command that started it, where no checkpoint says so.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.

    Raises:
        UsageError: It is no such run, it has other data or another controller than it had, or a
            setting cannot change.
        CheckpointError: The checkpoint is damaged or foreign, or another process writes the run.
    """
    folder = RunFolder(path)
    with folder.claim_run() as lock:
        written = read_request(folder)
        refuse_code(written, folder.path, model)
        request = change_settings(written, settings or {})
        state = Checkpoints(folder.path, GROWING).load(checkpoint)
        # What the checkpoint was saved under, not what the folder says: the file may be edited.
        changes = SettingChanges()
        if state is not None:
            with restoring(Checkpoints(folder.path, GROWING).folder / checkpoint):
                changes = compare_requests(dict(state["settings"]), request.to_mapping())
                if "controller" in {*changes.settings, *(settings or {})}:
                    state["gardener"]["controller"] = None
        data = request.load()
        growth = request.build(data)
        run = _reopen(
            folder,
            growth,
            request.to_mapping(),
            request.world(data),
            state,
            _Opening(lock, checkpoint, command, sinks, on_alarm),
            {*changes.settings, *(settings or {})},
        )
        if changes:
            record_changes(run.store, growth, changes)
            folder.log(f"changed: {changes.describe()}")
            # A change is made once; whoever continues after this has it.
            run.save()
        if request != written:
            folder.write_config(request.to_mapping())
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class _Opening:
    """How a run is opened again."""

    lock: WriterLock
    checkpoint: Which
    command: str
    sinks: Iterable[str | Sink]
    on_alarm: OnAlarm | None


def _reopen(
    folder: RunFolder,
    growth: GrowthRun,
    settings: Mapping[str, Any],
    world: World,
    state: dict[str, Any] | None,
    opening: _Opening,
    changed: Collection[str],
) -> GrowingRun:
    """Put a run into the state of a checkpoint and open its store."""
    shapes, command, versions = shapes_of(growth), opening.command, {}
    mark, best_score = None, -math.inf
    if state is not None:
        with restoring(Checkpoints(folder.path, GROWING).folder / opening.checkpoint):
            versions = world.differences(folder.path, state["world"], changed)
            _refuse_other_model(folder.path, shapes, state["shapes"])
            if state["gardener"]["controller"] is None:
                # Another controller knows nothing of what this one has seen.
                state["gardener"]["controller"] = growth.gardener.controller.state_dict()
            growth.load_state_dict(state)
            command, best_score = str(state["command"]), float(state["best_score"])
            # Without a mark, or without the store it speaks of, everything is written down anew.
            if (folder.path / STORE_FILE).exists():
                mark = state["telemetry"]
    store = open_store(
        folder.path,
        _row(folder, growth, settings, command),
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
        best_score=best_score,
        is_saved=state is not None and opening.checkpoint == "latest",
    )
    run.tell_versions(versions)
    return run


def _row(folder: RunFolder, growth: GrowthRun, settings: Mapping[str, Any], command: str) -> RunRow:
    return run_row(
        growth,
        name=folder.path.absolute().name,
        controller=growth.controller_name,
        config=settings,
        command=command,
    )


def grow(
    model: nn.Module,
    slots: SlotNames,
    *,
    train: Batches,
    val: Batches,
    epochs: int | None = None,
    axes: DeclaredAxes | None = None,
    controller: str | Controller = DEFAULT_CONTROLLER,
    loss: Loss | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    scheduler: LRScheduler | SchedulerFactory | None = None,
    scheduler_every: SchedulerEvery = "epoch",
    decide_every: int | None = None,
    test: Batches | None = None,
    max_seeds: int | None = None,
    max_parameters: int | None = None,
    max_added_flops: int | None = None,
    ablate_every: int | None = None,
    twin: bool | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    config: GrowthConfig | None = None,
    out: str | Path | None = None,
    resume: bool | Which = False,
    overwrite: bool = False,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> Grown:
    """Train a model for some epochs while a controller grows it.

    Args:
        model: any module; it is trained in place. What is frozen stays so: of a frozen model the
            seeds alone are trained, as adapters.
        slots: names of submodules whose output may be augmented (`*` stands for any part of a
            name: "blocks.*"), or what `suggest_slots` returns.
        train: (inputs, targets) batches, (input, ..., targets) for models of several inputs, or
            dicts with labels (Hugging Face); iterated anew each epoch, after `set_epoch(n)` where
            there is one.
        val: such batches in a fixed order.
        epochs: length of the run, 60 by default; with `decide_every`, how many decisions there
            are, by default as many as one pass over `train` holds.
        axes: what the axes of activations at slots are ("BTC", "TBC", "BCL", "BCHW", "BHWC",
            "BC"): one name for all, or by slot or pattern; found out where it is not declared.
        controller: 'heuristic', 'wait', 'random', 'schedule:FILE', or an object.
        loss: 'classification', 'language', 'regression', 'multilabel', 'model' for the loss that
            the model itself computes from labels; a criterion such as `nn.CrossEntropyLoss()`; or
            a function of (outputs, targets) to one number, to one for each sample, or to each
            sample's (loss, correct or None). By default the model's own where it has one, else
            'classification'.
        optimizer: an optimizer of the model's parameters, or a function from parameters to one
            (`torch.optim.AdamW`), whose parameters of seeds join by themselves; by default the one
            that `config.training` describes, with its learning rates for host and seeds.
        scheduler: a schedule of that optimizer, or a function from the optimizer to one; the
            learning rates are then its own, and those of `config.training` are not used.
        scheduler_every: whether it moves on after every 'epoch' or every 'batch'.
        decide_every: training steps from one decision to the next, for training in one pass; then
            `train` may be an iterator. By default a decision follows every pass over `train`.
        test: batches touched once, at the end.
        max_seeds: most seeds alive or fossilized at once; 0 is no limit.
        max_parameters: most trainable parameters; 0 is no limit.
        max_added_flops: most operations per sample that seeds may add; 0 is no limit.
        ablate_every: measure contributions at every this many epochs, 1 by default.
        twin: also train the un-grown twin on the same batches (twice the cost); off by default.
        seed: seed of new seeds, of controllers that draw and of dropout; 0 by default.
        device: where to train; by default where the model is.
        config: all settings and their defaults; the arguments above win over it.
        out: folder for the run's record, TensorBoard, checkpoints and report; without one, nothing
            is written.
        resume: go on with the run in `out`, called as when it was started, or start it where there
            is none; 'previous' goes on from the checkpoint before the latest. On the CPU the result
            is that of an uninterrupted run, provided that `train` depends on nothing but the epoch.
        overwrite: replace the run in `out`.
        on_epoch: called with the record of every epoch.

    A run that leaves the network as it was says why, as an `EsperWarning` and in `Grown.why`; one
    that is too short for a seed warns when it starts. In runs of less than 60 epochs all waits are
    shortened in proportion. A seed that was never blended in is not part of the result.

    Raises:
        UsageError: Something about the request is wrong; one line says what would be right.
        KeyboardInterrupt: Ctrl-C. With `out`, the epoch in progress was finished and saved.
    """
    base = config or GrowthConfig()
    if decide_every and epochs is None and config is None:
        epochs = _windows_in(train, decide_every)
    chosen = {"epochs": epochs, "seed": seed, "twin": twin, "decide_every": decide_every}
    gardener = base.gardener
    if ablate_every is not None:
        gardener = gardener.replace(ablate_every=ablate_every)
    settings = base.replace(
        **{name: value for name, value in chosen.items() if value is not None},
        garden=base.garden.limited(
            max_seeds=max_seeds, max_parameters=max_parameters, max_added_flops=max_added_flops
        ),
        gardener=gardener,
    )

    def build() -> GrowthRun:
        return model_run(
            model,
            slots,
            train=train,
            val=val,
            test=test,
            config=settings,
            axes=axes,
            loss=loss,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            controller=controller,
            device=device,
        )

    if out is None:
        if resume or overwrite:
            raise UsageError("resume and overwrite are about a run folder; name it by out=...")
        growth = build()
        for record in growth.epochs():
            if on_epoch is not None:
                on_epoch(record)
        return _told_why(growth.finish())
    if resume and overwrite:
        raise UsageError("resume continues a run and overwrite replaces it; give one of them")
    paths = slot_paths(slots, model)
    told = {
        STARTED_BY: "esper.grow",
        "model": type(model).__name__,
        "slots": paths if isinstance(slots, Mapping) else list(paths),
        "axes": dict(axes) if isinstance(axes, Mapping) else axes,
        "controller": _told(controller),
        "loss": _told(loss),
        "optimizer": _told(optimizer),
        "scheduler": _told(scheduler),
        "scheduler_every": scheduler_every,
        "growth": settings.to_mapping(),
    }
    folder = RunFolder(out)
    is_resumed = bool(resume) and folder.is_run
    if is_resumed:
        _refuse_other_settings(folder, told)
        which: Which = "previous" if resume == "previous" else "latest"
        growth = build()
        run = resume_growing(
            out, growth, told, _first_batch(growth), checkpoint=which, command="esper.grow(...)"
        )
    else:
        growth = build()
        run = start_growing(
            out, growth, told, _first_batch(growth), overwrite=overwrite, command="esper.grow(...)"
        )
    with run:
        carry_out_or_raise(run, on_epoch)
        return _told_why(run.finish()[0])


def _told_why(grown: Grown) -> Grown:
    """Warn where nothing grew although something might have, and say why."""
    if grown.why and grown.summary.controller != "wait":
        warnings.warn(" ".join(grown.why), EsperWarning, stacklevel=3)
    return grown


def _windows_in(train: Any, steps: int) -> int:
    """Return how many decisions one pass over the training data holds."""
    if not hasattr(train, "__len__"):
        raise UsageError(
            "with decide_every, say how many decisions there are by epochs=N: train has no length"
        )
    return max(1, len(train) // steps)


def _first_batch(growth: GrowthRun) -> World:
    """Return what can be known of somebody's loaders: their first validation batch."""
    return World.now({"data": batch_fingerprint(growth.example_input)})


def describe_contributions(result: Contributions) -> dict[str, Any]:
    """Return measured contributions as plain data."""

    def plain(estimates: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            " + ".join(key) if isinstance(key, tuple) else key: {"value": e.value, "se": e.se}
            for key, e in estimates.items()
        }

    return {
        "all_off": {"value": result.all_off.value, "se": result.all_off.se},
        "leave_one_out": plain(result.leave_one_out),
        "solo_on": plain(result.solo_on),
        "pairs": plain(result.pairs),
        "interactions": plain(result.interactions),
        "shapley": plain(result.shapley),
    }


def shapes_of(growth: GrowthRun) -> Shapes:
    """Return the shape of every weight of a host that has not grown yet."""
    weights = growth.garden.model.state_dict()
    return {name: list(value.shape) for name, value in weights.items() if hasattr(value, "shape")}


def _refuse_other_settings(folder: RunFolder, told: Mapping[str, Any]) -> None:
    saved = folder.read_config()
    if saved.get(STARTED_BY) != told[STARTED_BY]:
        raise UsageError(
            f"{folder.path} was not started by {told[STARTED_BY]}; continue it with: "
            f"{resume_command(folder.path, GROWING)}"
        )
    for key, (before, now) in changed_settings(saved, told).items():
        Checkpoints(folder.path, GROWING).refuse_other_format()
        raise UsageError(
            f"{key} is {before!r} in {folder.path} and cannot become {now!r} when it is continued; "
            "start a new run for that"
        )


def _refuse_other_model(path: Path, own: Shapes, saved: Shapes) -> None:
    for name in {**saved, **own}:
        if own.get(name) != saved.get(name):
            there, here = (shapes.get(name, "missing") for shapes in (saved, own))
            raise UsageError(
                f"{path} was started with another model: its {name} is {there} there and {here} "
                "here; continue it with the model it was started with"
            )


def _told(value: Any) -> str | None:
    """Return what can be written down of a function, a class or a name."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, partial):
        given = [repr(one) for one in value.args]
        given += [f"{name}={one!r}" for name, one in value.keywords.items()]
        return f"{_told(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
