"""`esper.grow`: train somebody's model while a controller grows it, in one call."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.batches import Batches, OptimizerFactory, count_samples
from esper.growth.checkpoint import REWARM, open_checkpoint
from esper.growth.config import DEFAULT_CONTROLLER, GrowthConfig, Keep
from esper.growth.criterion import Loss
from esper.growth.depth.rules import DeepenConfig
from esper.growth.grown import Format, Grown
from esper.growth.request import AUTO, STARTED_BY, GrowRequest
from esper.growth.run import GrowthLoop
from esper.kasmina.slots.placement import DeclaredAxes, SlotNames, slot_paths
from esper.kasmina.training import SchedulerEvery, SchedulerFactory
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, unknown_name, warn
from esper.leyline.reasons import decision_line, epoch_line, why_not_learned
from esper.leyline.records import EpochRecord
from esper.nissa.folder import RunFolder, Which
from esper.nissa.recorded import Stopped, stop_signals
from esper.nissa.sinks import DEFAULT_SINKS, Sink

if TYPE_CHECKING:
    from esper.nissa.store import OnAlarm

_BAR = 20
_CLEAR = "\r\x1b[2K"


def grow(
    model: nn.Module | str | Path,
    slots: SlotNames = AUTO,
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
    max_growth: float | str | None = None,
    max_seeds: int | None = None,
    max_parameters: int | None = None,
    max_added_flops: int | None = None,
    ablate_every: int | None = None,
    twin: bool | None = None,
    keep: Keep | None = None,
    patience: int | None = None,
    deepen: bool | Mapping[str, Any] | DeepenConfig | None = None,
    checkpoint: str | Path | None = None,
    rewarm: int | float | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    config: GrowthConfig | None = None,
    out: str | Path | None = None,
    resume: bool | Which = False,
    overwrite: bool = False,
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    progress: bool | None = None,
) -> Grown:
    """Train a model for some epochs while a controller grows it.

    Args:
        model: any module; it is trained in place. What is frozen stays so: of a frozen model the
            seeds alone are trained, as adapters. Or a folder of Hugging Face's `save_pretrained`,
            to grow that network further.
        slots: names of submodules whose output may be augmented (`*` stands for any part of a
            name: "blocks.*"), or what `suggest_slots` returns; "auto", the default, asks it on
            the first validation batch.
        train: (inputs, targets) batches, (input, ..., targets) for models of several inputs, or
            dicts with labels (Hugging Face); iterated anew each epoch, after `set_epoch(n)` where
            there is one.
        val: such batches in a fixed order.
        epochs: length of the run, 60 by default; with `decide_every`, how many decisions there
            are, by default as many as one pass over `train` holds.
        axes: what the axes of activations at slots are ("BTC", "TBC", "BCL", "BCHW", "BHWC",
            "BC"): one name for all, or by slot or pattern; found out where it is not declared.
        controller: 'tamiyo', the learned one that comes along, which grows the network to twice its
            parameters and operations at most unless limits are given; 'heuristic', 'wait',
            'random', 'schedule:FILE', or an object.
        loss: 'classification', 'language', 'regression', 'multilabel', 'model' for the loss that
            the model itself computes from labels; a criterion such as `nn.CrossEntropyLoss()`; or
            a function of (outputs, targets) to one number, to one for each sample, or to each
            sample's (loss, correct or None). By default the model's own where it has one, else
            'classification'.
        optimizer: an optimizer of the model's parameters, or a function from parameters to one
            (`torch.optim.AdamW`), whose parameters of seeds join by themselves; by default the one
            that `config.training` describes, with its learning rates for host and seeds: SGD with
            momentum 0.9, weight decay 0.0005 and a constant rate of 0.01. With any optimizer,
            gradients of the host and of each seed are clipped to a norm of 1, apart;
            `config=GrowthConfig(training={"max_grad_norm": 0})` does without.
        scheduler: a schedule of that optimizer, or a function from the optimizer to one; the
            learning rates are then its own, and those of `config.training` are not used.
        scheduler_every: whether it moves on after every 'epoch' or every 'batch'.
        decide_every: training steps from one decision to the next, for training in one pass; then
            `train` may be an iterator. By default a decision follows every pass over `train`.
        test: batches touched once, at the end.
        max_growth: most parameters and operations of the grown network, as a multiple of the
            model's: 2.0 or "2x" lets it double. By default what the controller learned under:
            'tamiyo' grows a network to twice its size at most, rules know no limit.
        max_seeds: most seeds alive or fossilized at once; 0 is no limit.
        max_parameters: most trainable parameters, in place of what `max_growth` allows.
        max_added_flops: most operations per sample that seeds may add, likewise.
        ablate_every: measure contributions at every this many epochs, 1 by default.
        twin: also train the un-grown twin on the same batches (twice the cost); off by default.
        keep: which network is returned, of the twin alike: 'best', the default, for the one of the
            best validated epoch (the first of several), or 'last'.
        patience: stop after this many epochs without a better validation score; by default, and
            with 0, never. Give it more epochs than a seed needs from germination to its full
            amplitude; one that the stop has caught half-way is named in `Grown.why`.
        deepen: let blocks sleep and wake instead of growing seeds (docs/how-to/deepen.md): True for
            a quarter of them at first, doubled at 20 % and 40 % of the run; or a mapping, such as
            {"start": 3, "at": {0.2: 6, 0.4: 12}, "controller": "plateau", "weights": FILE}, or a
            `DeepenConfig`. The result is a `Deepened`, whose `model` is your own object; its twin,
            where asked for, is the static network with all blocks awake.
        checkpoint: weights of a finished network to grow further: a folder of `grown.save`, of a
            run or of `save_pretrained`, or a file of `model.state_dict()`. Without `deepen` the
            model is built as the network was before it grew; with `deepen` it has all blocks, and
            the checkpoint those that are awake at first. Seeds in it become a part of the network,
            which is then a copy of the model.
        rewarm: optimizer steps, or share of the run (0.1), in which learning rates rise from 0 to
            what they are set to; 0.05 with a checkpoint, else 0.
        seed: seed of new seeds, of controllers that draw and of dropout; 0 by default.
        device: where to train; by default where the model is.
        config: all settings and their defaults (below `growth` on the page Settings); the arguments
            above win over it.
        out: folder for the run's record, TensorBoard, checkpoints and report; without one, nothing
            is written.
        resume: go on with the run in `out`, called as when it was started, or start it where there
            is none. What `esper grow --resume` may change may be another than
            before: `epochs` to extend it, `controller`, `keep`, `patience`, and limits of growth.
            'previous' goes on from the checkpoint before the latest. On the CPU the result is that
            of an uninterrupted run, provided that `train` depends on nothing but the epoch.
        overwrite: replace the run in `out`.
        sinks: where curves and alarms of a run in `out` are shown beside its store: 'tensorboard',
            'wandb' (with WANDB_MODE=offline without a server), a registered name, or an object.
        on_epoch: called with the record of every epoch; it ends the run, with its result, by
            raising StopIteration.
        progress: show every epoch on standard error; by default where that is a terminal.

    A run that leaves the network as it was, or a seed half blended in, says why, as an
    `EsperWarning` and in `Grown.why`; one that is too short for a seed, or unlike all that the
    controller has learned in, warns when it starts. `Grown.static_warning` says where a static
    network of the same size is likely to do as well, also as a warning. In runs of less than 60
    epochs all waits are shortened in proportion. A seed that was never blended in is not part of
    the result.

    Raises:
        UsageError: Something about the request is wrong; one line says what would be right.
        KeyboardInterrupt: Ctrl-C. With `out`, the epoch in progress was finished and saved.
    """
    base = config or GrowthConfig()
    source, given = model if isinstance(model, str | os.PathLike) else checkpoint, model
    deepening = (None if deepen is None else DeepenConfig.of(deepen)) or base.deepen
    if source is not None:
        model, deepening = open_checkpoint(model, checkpoint, deepening)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(optimizer, Optimizer) and model is not given:
        raise UsageError(
            "the network of the checkpoint is another object than the optimizer's; give a function "
            "of its parameters: optimizer=partial(torch.optim.AdamW, lr=...)"
        )
    if source is not None and rewarm is None and not base.rewarm:
        rewarm = REWARM
    if decide_every and epochs is None and config is None:
        epochs = _windows_in(train, decide_every)
    chosen = {
        "epochs": epochs,
        "seed": seed,
        "twin": twin,
        "decide_every": decide_every,
        "keep": keep,
        "patience": patience,
        "deepen": deepening,
        "rewarm": rewarm,
    }
    gardener = base.gardener
    if ablate_every is not None:
        gardener = gardener.replace(ablate_every=ablate_every)
    settings = base.replace(
        **{name: value for name, value in chosen.items() if value is not None},
        garden=base.garden.limited(
            max_growth=max_growth,
            max_seeds=max_seeds,
            max_parameters=max_parameters,
            max_added_flops=max_added_flops,
        ),
        gardener=gardener,
    )

    if out is None and (resume or overwrite):
        raise UsageError("resume and overwrite are about a run folder; name it by out=...")
    if out is None and sinks != DEFAULT_SINKS:
        raise UsageError("sinks show what is recorded in a run folder; name it by out=...")
    if resume and overwrite:
        raise UsageError("resume continues a run and overwrite replaces it; give one of them")
    request = GrowRequest(
        model=model,
        slots=slots,
        train=train,
        val=val,
        test=test,
        config=_with_samples(settings, train),
        axes=axes,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_every=scheduler_every,
        controller=controller,
        name=type(model).__name__,
        device=device,
    )
    resumed: Which | None = None
    if out is not None:
        written = _written(request, settings)
        if source is not None:
            written["checkpoint"] = str(source)
        request = replace(request, settings=written)
        # A callback may leave the current folder.
        out = Path(out).absolute()
        if resume and RunFolder(out).is_run:
            resumed = "previous" if resume == "previous" else "latest"
    watcher = EpochProgress(settings.epochs) if is_shown(progress) else None

    @contextmanager
    def watch(growth: GrowthLoop) -> Iterator[Show]:
        def show(record: EpochRecord) -> None:
            if watcher is not None:
                watcher.show(record)
            if on_epoch is None:
                return
            try:
                on_epoch(record)
            except StopIteration as stop:
                growth.stop(f"on_epoch raised StopIteration{f' ({stop})' if str(stop) else ''}")

        yield show

    try:
        grown, _ = carry_out(
            request,
            out,
            watch=watch,
            resume=resumed,
            overwrite=overwrite,
            command="esper.grow(...)",
            sinks=sinks,
        )
    except Stopped as stop:
        if stop.signal != signal.SIGINT:
            # What this program does on such a signal is its own affair; usually it ends here.
            signal.raise_signal(stop.signal)
        raise
    return _told_why(grown)


Show = Callable[[EpochRecord], None]
"""Shows an epoch that was just recorded."""


def carry_out(
    request: GrowRequest,
    out: str | Path | None = None,
    *,
    watch: Callable[[GrowthLoop], AbstractContextManager[Show]],
    resume: Which | None = None,
    overwrite: bool = False,
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
    export: Format | None = None,
) -> tuple[Grown, dict[str, Any]]:
    """Grow the network that a request describes; return it, with the summary in its run folder.

    Args:
        request: what is grown.
        out: the run folder; without one nothing is written, and the summary is empty.
        watch: called once the run is open; within its block every epoch is shown.
        resume: the checkpoint to go on from; a new run by default.
        overwrite: replace the run in `out`.
        command: what started the run, for its record.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.
        export: also write the network into the folder in this format.

    Raises:
        Stopped: A signal came; the run in `out` is saved and can be continued.
        UsageError: Parts of the request do not go together.
    """
    _check(request)
    if out is None:
        growth = GrowthLoop(request)
        with watch(growth) as show:
            for record in growth.epochs():
                show(record)
        return growth.finish(), {}
    # Who keeps no record loads neither store nor report.
    from esper.growth.recorded import open_growth

    with ExitStack() as opened:
        # What comes while it opens is heeded after the first epoch, which can be saved.
        with stop_signals() as noted:
            run = opened.enter_context(
                open_growth(
                    request,
                    out,
                    resume=resume,
                    overwrite=overwrite,
                    command=command,
                    sinks=sinks,
                    on_alarm=on_alarm,
                )
            )
            with watch(run.growth) as show:
                is_done = run.carry_out(show, lambda: bool(noted))
        # All that was trained is saved: who wants to stop now does so at once.
        if is_done:
            return run.finish(export)
    raise Stopped(run.folder.path, noted[0], run.growth.gardener.epoch)


def _check(request: GrowRequest) -> None:
    """Refuse what does not go together, before anything is read."""
    every, known = request.scheduler_every, get_args(SchedulerEvery)
    if every not in known:
        raise unknown_name("scheduler_every", every, known)
    if request.scheduler is None and every != "epoch":
        raise UsageError(f"scheduler_every={every!r} needs a scheduler; give scheduler=... too")
    config, deepen = request.config, request.config.deepen
    if deepen is None:
        return
    for_seeds = {
        "slots": request.slots != AUTO,
        "axes": request.axes is not None,
        "controller": request.controller not in (DEFAULT_CONTROLLER, "wait"),
        "max_growth": bool(config.garden.max_growth),
        "max_added_flops": bool(config.garden.max_added_flops),
        "max_seeds": bool(config.garden.lifecycle.rules.max_seeds),
    }
    if given := [name for name, is_given in for_seeds.items() if is_given]:
        hint = "deepen={'controller': ...}" if given == ["controller"] else "leave it out"
        raise UsageError(
            f"{given[0]} is for seeds, and deepen grows none ({hint}); to grow seeds afterwards, "
            "write esper.grow(grown.model, slots=...)"
        )
    if config.twin and deepen.weights is not None:
        raise UsageError(
            "the twin of a deepened network starts from the model's own weights, but deepen gives "
            "other ones; leave out twin"
        )


def _told_why(grown: Grown) -> Grown:
    """Warn where nothing was learned or grew, or not to the end, or as well without growing."""
    why = [*grown.why, *filter(None, [grown.static_warning])]
    if grown.summary.controller == "wait":
        why = [line for line in [why_not_learned(grown.history, grown.summary.chance_loss)] if line]
    if why:
        warn(" ".join(why))
    return grown


def _windows_in(train: Any, steps: int) -> int:
    """Return how many decisions one pass over the training data holds."""
    if not hasattr(train, "__len__"):
        raise UsageError(
            "with decide_every, say how many decisions there are by epochs=N: train has no length"
        )
    return max(1, len(train) // steps)


def _written(request: GrowRequest, config: GrowthConfig) -> dict[str, Any]:
    """Return what `config.yaml` says of a run that a program has asked for."""
    slots, axes, depth = request.slots, request.axes, config.deepen
    paths: Any = slots if slots == AUTO else slot_paths(slots, request.model)
    return {
        STARTED_BY: "esper.grow",
        "model": request.name,
        "slots": paths if isinstance(slots, Mapping | str) else list(paths),
        "axes": dict(axes) if isinstance(axes, Mapping) else axes,
        "controller": _told(request.controller) if depth is None else depth.rule,
        "loss": _told(request.loss),
        "optimizer": _told(request.optimizer),
        "scheduler": _told(request.scheduler),
        "scheduler_every": request.scheduler_every,
        "growth": config.to_mapping(),
    }


def _told(value: Any) -> str | None:
    """Return what can be written down of a function, a class or a name."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, partial):
        given = [repr(one) for one in value.args]
        given += [f"{name}={one!r}" for name, one in value.keywords.items()]
        return f"{_told(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class EpochProgress:
    """Shows every epoch; on a terminal as a bar that stays in its line, else as a line each.

    What a controller did to a seed stays on the screen in either case.

    Args:
        epochs: length of the run.
        stream: where to; standard error by default.
    """

    def __init__(self, epochs: int, stream: TextIO | None = None) -> None:
        """Nothing is shown yet."""
        self._epochs = epochs
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()

    def show(self, record: EpochRecord) -> None:
        """Take over one epoch."""
        done = _BAR * record.epoch // self._epochs
        bar = f"{'━' * done}{'╌' * (_BAR - done)} " if self._is_live else ""
        line = f"{bar}epoch {record.epoch}/{self._epochs}  {epoch_line(record)}"
        acts = [one for one in record.decisions if one.is_act]
        event = "".join(f"{decision_line(record.epoch, one)}\n" for one in acts)
        if not self._is_live:
            self._write(f"{line}\n{event}")
            return
        self._write(f"{_CLEAR}{event}{line}{chr(10) if record.epoch >= self._epochs else ''}")

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        # What the terminal's alphabet lacks is shown as a question mark, not as a crash.
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def is_shown(asked: bool | None) -> bool:
    """Return whether to show epochs; where nobody said so, whether somebody watches."""
    return sys.stderr is not None and sys.stderr.isatty() if asked is None else asked


def _with_samples(config: GrowthConfig, train: Batches) -> GrowthConfig:
    """Return the settings with the number of samples that somebody's batches tell of."""
    samples = count_samples(train)
    # How many samples so many steps have, nobody says.
    each = 0 if config.decide_every else samples
    facts = config.gardener.with_task_facts(train_samples=samples, samples_per_epoch=each)
    return config.replace(gardener=facts)
