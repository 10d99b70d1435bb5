"""`esper.grow`: grow a network of your own in one call; `task_run`: grow a task's host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from esper.growth.gardener import DEFAULT_CONTROLLER
from esper.growth.grown import Grown
from esper.growth.run import Batches, GrowthConfig, GrowthRun
from esper.kasmina.trainee import SchedulerFactory
from esper.leyline.config import Config, option
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, unknown_name
from esper.leyline.randomness import generator
from esper.leyline.records import EpochRecord
from esper.tasks.dataset import TaskData
from esper.tasks.objective import OBJECTIVES, Objective
from esper.tasks.splits import Split
from esper.tasks.task import Task


class TrainingBatches:
    """One epoch of training batches after another; each epoch depends on its number alone."""

    def __init__(self, data: TaskData, batch_size: int, seed: int) -> None:
        """Serve `samples_per_step` samples per epoch."""
        self._data = data
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch the next iteration is."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-self._data.samples_per_step // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._data.order(self._seed, 0, self._epoch)
        augment = generator(self._seed, 0, self._epoch, "augment")
        for indices in order.split(self._batch_size):
            yield self._data.batch("train", indices, augment)


class FixedBatches:
    """The same samples in the same order each time."""

    def __init__(
        self, data: TaskData, split: Split, *, subset: bool = False, batch_size: int = 256
    ) -> None:
        """Serve a whole split, or the fixed validation subset used while growing."""
        whole = torch.arange(data.size(split), device=data.device)
        self._indices = data.subset if subset else whole
        self._data = data
        self._split: Split = split
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._indices.split(self._batch_size):
            yield self._data.batch(self._split, indices)


def grow(
    model: nn.Module,
    slots: Sequence[str] | Mapping[str, str],
    *,
    train: Batches,
    val: Batches,
    epochs: int | None = None,
    controller: str | Controller = DEFAULT_CONTROLLER,
    loss: str | Objective = "classification",
    optimizer: Callable[..., Optimizer] | None = None,
    scheduler: SchedulerFactory | None = None,
    test: Batches | None = None,
    max_seeds: int | None = None,
    max_parameters: int | None = None,
    max_added_flops: int | None = None,
    ablate_every: int | None = None,
    twin: bool | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    config: GrowthConfig | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> Grown:
    """Train a model for some epochs while a controller grows it.

    Args:
        model: any module; it is trained in place.
        slots: names of submodules whose output may be augmented.
        train: (inputs, targets) batches, iterated anew each epoch.
        val: (inputs, targets) batches in a fixed order.
        epochs: length of the run, 60 by default.
        controller: 'heuristic', 'wait', 'random', 'schedule:FILE', or an object.
        loss: 'classification', 'language', 'regression', or a function from (outputs, targets) to
            per-sample (loss, correct or None).
        optimizer: takes the parameters and returns an optimizer; SGD with momentum by default.
        scheduler: takes the optimizer and returns a schedule, stepped once per epoch.
        test: batches touched once, at the end.
        max_seeds: most seeds alive or fossilized at once; 0 is no limit.
        max_parameters: most trainable parameters; 0 is no limit.
        max_added_flops: most operations per sample that seeds may add; 0 is no limit.
        ablate_every: measure contributions at every this many epochs, 1 by default.
        twin: also train the un-grown twin on the same batches (twice the cost); off by default.
        seed: seed of new seeds, of controllers that draw and of dropout; 0 by default.
        device: where to train; by default where the model is.
        config: all settings and their defaults; the arguments above win over it.
        on_epoch: called with the record of every epoch.
    """
    base = config or GrowthConfig()
    chosen = {"epochs": epochs, "seed": seed, "twin": twin}
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
    run = GrowthRun(
        model,
        slots=slots,
        train=train,
        val=val,
        test=test,
        objective=find_objective(loss),
        optimizer=optimizer or partial(SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
        scheduler=scheduler,
        controller=controller,
        config=settings,
        name=type(model).__name__,
        device=device,
    )
    for record in run.epochs():
        if on_epoch is not None:
            on_epoch(record)
    return run.finish()


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """How a network is trained on data that Esper owns."""

    batch_size: int = option(64, "Samples in one optimizer step.", minimum=1)
    learning_rate: float = option(0.01, "Learning rate of SGD.", above=0.0)
    momentum: float = option(0.9, "Momentum of SGD.", minimum=0.0, maximum=0.9999)
    weight_decay: float = option(5e-4, "Weight decay of SGD.", minimum=0.0)


def data_run(
    model: nn.Module,
    slots: Sequence[str] | Mapping[str, str],
    data: TaskData,
    *,
    config: GrowthConfig,
    training: TrainingConfig,
    controller: str | Controller = DEFAULT_CONTROLLER,
    name: str = "model",
) -> GrowthRun:
    """Return the run that grows a model on data held by Esper: reproducible and resumable."""
    return GrowthRun(
        model,
        slots=slots,
        train=TrainingBatches(data, training.batch_size, config.seed),
        val=FixedBatches(data, "val", subset=True),
        test=FixedBatches(data, "test"),
        objective=OBJECTIVES[data.objective],
        optimizer=partial(
            SGD,
            lr=training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        ),
        config=config,
        controller=controller,
        name=name,
        device=data.device,
    )


def task_run(
    task: Task,
    data: TaskData,
    *,
    config: GrowthConfig,
    controller: str | Controller = DEFAULT_CONTROLLER,
) -> GrowthRun:
    """Return the run that grows a task's host on its data."""
    return data_run(
        task.build_host(config.seed),
        task.slot_paths,
        data,
        config=config,
        training=task_training(task),
        controller=controller,
        name=task.name,
    )


def task_training(task: Task) -> TrainingConfig:
    """Return how a task trains its host."""
    settings = task.config
    return TrainingConfig(
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def task_config(task: Task, **changes: Any) -> GrowthConfig:
    """Return the settings a task asks for, with some changed; its twin runs by default."""
    settings = task.config
    base = GrowthConfig(epochs=settings.horizon, twin=True, max_grad_norm=settings.max_grad_norm)
    gardener = base.gardener.replace(param_budget=settings.param_budget)
    return base.replace(gardener=gardener, **changes)


def find_objective(loss: str | Objective) -> Objective:
    """Return the per-sample objective of this name, or the function itself."""
    if callable(loss):
        return loss
    for name, objective in OBJECTIVES.items():
        if name == loss:
            return objective
    if not isinstance(loss, str):
        raise UsageError(f"loss must be a name or a function, got {loss!r}")
    raise unknown_name("loss", loss, OBJECTIVES)
