"""`esper.grow`: trains a model while a controller grows it, in one call."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
from esper.growth.request import AUTO, STARTED_BY, GrowRequest, check_request
from esper.growth.run import GrowthLoop
from esper.kasmina.slots.placement import DeclaredAxes, SlotNames, slot_paths
from esper.kasmina.training import SchedulerEvery, SchedulerFactory
from esper.leyline.config import check_config
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, describe_no_module, warn
from esper.leyline.learning import why_not_learned, why_not_learning
from esper.leyline.reasons import decision_line, epoch_line
from esper.leyline.records import EpochRecord
from esper.nissa.folder import RunFolder, Which
from esper.nissa.recorded import Stopped, stop_signals
from esper.nissa.sinks import DEFAULT_SINKS, Sink
from esper.utils.files import as_path

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
    budget: float | str | None = None,
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
        model: any module, trained in place. Frozen parameters stay frozen: in a frozen model only
            the seeds train, as adapters. Or a folder written by Hugging Face's `save_pretrained`,
            to grow that network further.
        slots: names of submodules whose output may be augmented (`*` matches any part of a name:
            "blocks.*"), or the result of `suggest_slots`. "auto", the default, calls
            `suggest_slots` on the first validation batch.
        train: (inputs, targets) batches, (input, ..., targets) for models of several inputs, or
            dicts with labels (Hugging Face). They are iterated again in every epoch, after
            `set_epoch(n)` if they have it.
        val: such batches in a fixed order.
        epochs: length of the run, by default 60. With `decide_every`, the number of decisions; by
            default as many as one pass over `train` holds.
        axes: names of the axes of activations at slots ("BTC", "TBC", "BCL", "BCHW", "BHWC",
            "BC"): one for all slots, or by slot or pattern. Axes that are not declared are
            inferred.
        controller: 'tamiyo', the learned one that ships; 'trial', 'heuristic', 'wait', 'random',
            'schedule:FILE', or an object.
        loss: 'classification', 'language', 'regression', 'multilabel', or 'model' for the loss that
            the model itself computes from labels; a criterion such as `nn.CrossEntropyLoss()`; or
            a function of (outputs, targets) that returns one number, one for each sample, or each
            sample's (loss, correct or None). By default the model's own loss if it has one, else
            'classification'.
        optimizer: an optimizer of the model's parameters, or a function from parameters to one
            (`torch.optim.AdamW`). Parameters of seeds are added to it. By default the one of
            `config.training`: SGD with momentum 0.9, weight decay 0.0005 and a constant rate of
            0.01. With any optimizer, gradients of the host and of each seed are clipped separately
            to a norm of 1; `config=GrowthConfig(training={"max_grad_norm": 0})` turns that off.
        scheduler: a schedule of that optimizer, or a function from the optimizer to one; it
            replaces the learning rates of `config.training`.
        scheduler_every: whether to step the schedule after every 'epoch' or every 'batch'.
        decide_every: training steps between two decisions, for training in one pass; `train` may
            then be an iterator. By default a decision follows every pass over `train`.
        budget: training FLOPs of the whole run, such as 2e12, or a multiple of what the model would
            take for all epochs, such as "10x". Every epoch is then an equal share of the budget,
            so that a small network takes more steps than a grown one, and learning rates follow
            what is spent. Evaluation and ablations are counted, too. A twin has as large a budget
            of its own.
        test: batches used once, at the end.
        max_growth: largest size of the grown network, in parameters and operations, as a multiple
            of the model's: 2.0 or "2x" lets it double. By default the controller's own limit: 2.0
            for 'tamiyo', none for the others.
        max_seeds: most seeds alive or fossilized at once; 0 is no limit.
        max_parameters: most trainable parameters, instead of `max_growth`.
        max_added_flops: most operations per sample that seeds may add, instead of `max_growth`.
        ablate_every: measure contributions every so many epochs, by default 1.
        twin: also train the un-grown twin on the same batches (twice the cost); by default off.
        keep: which network to return, and which twin: that of the 'best' validated epoch (the
            default; the first of equals) or of the 'last'.
        patience: stop after this many epochs without a better validation score; 0, the default,
            never stops. Give it more epochs than a seed needs to reach its full amplitude; a seed
            that is unfinished at the stop is named in `Grown.why`.
        deepen: let blocks sleep and wake instead of growing seeds (docs/how-to/deepen.md). True
            starts with a quarter of them and doubles at 20 % and 40 % of the run. Or a mapping
            such as {"start": 3, "at": {0.2: 6, 0.4: 12}, "controller": "plateau", "weights": FILE},
            or a `DeepenConfig`. The result is a `Deepened`, whose `model` is your own object; its
            twin is the static network with all blocks awake.
        checkpoint: weights of a finished network to grow further: a folder of `grown.save`, of a
            run or of `save_pretrained`, or a file of `model.state_dict()`. Without `deepen`, build
            the model as the network was before it grew; seeds in the checkpoint become part of the
            network, which is then a copy of the model. With `deepen`, build the model with all
            blocks; the checkpoint has those that are awake at first.
        rewarm: optimizer steps (200), or share of the run (0.1, below 1), over which learning rates
            rise from 0; 0.05 with a checkpoint, else 0.
        seed: seed of new seeds, of random controllers and of dropout; by default 0.
        device: where to train; by default where the model is.
        config: all settings with their defaults (below `growth` on the page Settings); the
            arguments above take precedence.
        out: folder for the run's store, TensorBoard files, checkpoints and report; by default
            nothing is written.
        resume: continue the run in `out`, called with the same arguments, or start it if there is
            none, with a warning. `epochs`, `controller`, `keep`, `patience` and the limits may
            differ (the page Settings lists all that may). 'previous' continues from the checkpoint
            before the latest. On the CPU the result equals that of an uninterrupted run, provided
            that `train` depends only on the epoch.
        overwrite: replace the run in `out`.
        sinks: where to show curves and alarms of a run in `out`, beside its store: 'tensorboard',
            'wandb' (with WANDB_MODE=offline without a server), a registered name, or an object.
        on_epoch: called with the record of every epoch; raise StopIteration in it to end the run
            with its result.
        progress: show every epoch on standard error; by default if that is a terminal.

    If the network did not grow, a seed is only partly blended in, or was pruned after the epoch
    that is returned, an `EsperWarning` and `Grown.why` give the reasons. A run that is too short
    for its controller warns at the start. If a static network of the same size is likely to do as
    well, a warning and `Grown.static_warning` say so. In runs of less than 60 epochs all waits are
    shortened in proportion. Seeds that were never blended in are not part of the result.

    Raises:
        UsageError: The request is wrong; the message says what to write instead.
        KeyboardInterrupt: Ctrl-C. With `out`, the epoch in progress was finished and saved; a
            second Ctrl-C ends at once with what is saved.
    """
    base = check_config(config, GrowthConfig)
    source, given = model if isinstance(model, str | os.PathLike) else checkpoint, model
    deepening = (None if deepen is None else DeepenConfig.of(deepen)) or base.deepen
    if source is not None:
        model, deepening = open_checkpoint(model, checkpoint, deepening)
    if not isinstance(model, nn.Module):
        raise UsageError(describe_no_module(model))
    if isinstance(optimizer, Optimizer) and model is not given:
        raise UsageError(
            "the checkpoint replaces the model, so this optimizer holds the wrong parameters; "
            "write optimizer=partial(torch.optim.AdamW, lr=...)"
        )
    if source is not None and rewarm is None and not base.rewarm and budget is None:
        rewarm = REWARM
    if decide_every and epochs is None and config is None:
        epochs = _windows_in(train, decide_every)
    chosen = {
        "epochs": epochs,
        "seed": seed,
        "twin": twin,
        "decide_every": decide_every,
        "budget": budget,
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
        raise UsageError("resume and overwrite need a run folder; write out='runs/mine'")
    if out is None and sinks != DEFAULT_SINKS:
        raise UsageError("sinks need a run folder; write out='runs/mine'")
    if resume and overwrite:
        raise UsageError("resume continues a run and overwrite replaces it; give one of them")
    if on_epoch is not None and not callable(on_epoch):
        raise UsageError(
            f"on_epoch must be a function of an EpochRecord, got {on_epoch!r}; write "
            "on_epoch=lambda record: print(record.val_score)"
        )
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
        saved = _run_settings(request, settings)
        if source is not None:
            saved["checkpoint"] = str(source)
        request = replace(request, settings=saved)
        # A callback may change the current folder.
        out = as_path(out, "runs/mine").absolute()
        if resume and RunFolder(out).is_run:
            resumed = "previous" if resume == "previous" else "latest"
        elif resume and not out.exists():
            warn(f"there is no run in {out} to resume, so a new one starts there")
    show_progress = progress_of(settings.epochs, progress)

    @contextmanager
    def watch(growth: GrowthLoop) -> Iterator[Show]:
        def show(record: EpochRecord) -> None:
            show_progress(record)
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
            # The program's own handler decides what follows; usually the program ends here.
            signal.raise_signal(stop.signal)
        raise
    return _warn_at_end(grown)


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
    """Grow the network of a request; return it, with the summary of its run folder.

    Args:
        request: what to grow.
        out: the run folder; without one nothing is written, and the summary is empty.
        watch: returns a context, entered once the run is open, that gives the function to show
            epochs.
        resume: the checkpoint to continue from; by default a new run.
        overwrite: replace the run in `out`.
        command: what started the run, for its record.
        sinks: where to show records beside the store.
        on_alarm: called with every alarm.
        export: also write the network into the folder in this format.

    Raises:
        Stopped: A signal came; the run in `out` is saved and can be continued.
        UsageError: Parts of the request contradict each other.
    """
    check_request(request)
    if out is None:
        growth = GrowthLoop(request)
        with watch(growth) as show:
            for record in growth.epochs():
                show(record)
        return growth.finish(), {}
    # A run without a folder loads neither store nor report.
    from esper.growth.recorded import RecordedGrowth, open_growth

    run: RecordedGrowth | None = None

    def announce(number: int) -> str:
        now = "finishing the first epoch, then saving" if run is None else run.describe_stop()
        return f"{now}{'; press Ctrl-C again to stop now' if number == signal.SIGINT else ''}"

    with ExitStack() as opened:
        # A signal that comes while the run opens stops it after the first epoch.
        with stop_signals(announce) as noted:
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
            try:
                with watch(run.growth) as show:
                    is_done = run.carry_out(show, lambda: bool(noted))
            except KeyboardInterrupt:
                if not noted or not run.saved_epoch:
                    raise
                raise Stopped(run.folder.path, noted[0], run.saved_epoch) from None
        # Everything is saved by now, so a signal stops the program at once.
        if is_done:
            return run.finish(export)
    raise Stopped(run.folder.path, noted[0], run.saved_epoch)


def _warn_at_end(grown: Grown) -> Grown:
    """Warn if the network did not learn or grow, or if a static one would likely do as well."""
    history, chance = grown.history, grown.summary.chance_loss
    why = [*grown.why, *filter(None, [grown.static_warning])]
    not_learned = why_not_learned(history, chance)
    trains = grown.summary.parameters_before > 0
    if grown.summary.controller == "wait":
        # A warning has said at the start that nothing trains.
        why = [not_learned] if not_learned and trains else []
    if trains and why_not_learning(history, chance, int(grown.config.to_mapping()["epochs"])):
        # A warning has said so early in the run; of a frozen host it says nothing there.
        why = [line for line in why if line != not_learned]
    if why:
        warn(" ".join(why))
    return grown


def _windows_in(train: Any, steps: int) -> int:
    """Return the number of decisions in one pass over the training data."""
    if not hasattr(train, "__len__"):
        raise UsageError(
            "train has no length, so decide_every needs the number of decisions; write epochs=N"
        )
    return max(1, len(train) // steps)


def _run_settings(request: GrowRequest, config: GrowthConfig) -> dict[str, Any]:
    """Return the content of `config.yaml` for a run that a program started."""
    slots, axes, depth = request.slots, request.axes, config.deepen
    paths: Any = slots if slots == AUTO else slot_paths(slots, request.model)
    return {
        STARTED_BY: "esper.grow",
        "model": request.name,
        "slots": paths if isinstance(slots, Mapping | str) else list(paths),
        "axes": dict(axes) if isinstance(axes, Mapping) else axes,
        "controller": _label(request.controller) if depth is None else depth.rule,
        "loss": _label(request.loss),
        "optimizer": _label(request.optimizer),
        "scheduler": _label(request.scheduler),
        "scheduler_every": request.scheduler_every,
        "growth": config.to_mapping(),
    }


def _label(value: Any) -> str | None:
    """Return a function, a class or a name as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, partial):
        given = [repr(one) for one in value.args]
        given += [f"{name}={one!r}" for name, one in value.keywords.items()]
        return f"{_label(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class EpochProgress:
    """Shows every epoch: on a terminal as one progress bar, elsewhere as a line each.

    Actions on seeds are always printed on lines of their own.

    Args:
        epochs: length of the run.
        stream: where to write; by default standard error.
    """

    def __init__(self, epochs: int, stream: TextIO | None = None) -> None:
        """Write nothing yet."""
        self._epochs = epochs
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()

    def show(self, record: EpochRecord) -> None:
        """Show one epoch."""
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
        # Characters that the terminal cannot encode become question marks.
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def progress_of(epochs: int, asked: bool | None) -> Show:
    """Return what shows epochs if asked to; by default if standard error is a terminal."""
    if asked is None:
        asked = sys.stderr is not None and sys.stderr.isatty()
    return EpochProgress(epochs).show if asked else lambda record: None


def _with_samples(config: GrowthConfig, train: Batches) -> GrowthConfig:
    """Return the settings with the number of training samples, if the batches tell it."""
    samples = count_samples(train)
    # The number of samples in `decide_every` steps is unknown.
    each = 0 if config.decide_every else samples
    facts = config.gardener.with_task_facts(train_samples=samples, samples_per_epoch=each)
    return config.replace(gardener=facts)
