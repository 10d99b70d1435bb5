"""Building a `GrowthRun`: of data Esper holds, of a task; and what a run is told of its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.criterion import predictions, refuse_labels
from esper.growth.gardener import DEFAULT_CONTROLLER
from esper.growth.run import GrowthConfig, GrowthRun
from esper.kasmina.costs import NO_LIMIT
from esper.kasmina.placement import DeclaredAxes, SlotNames
from esper.kasmina.probe import call_arguments, evaluating
from esper.leyline.axes import USUAL_AXES
from esper.leyline.controller import Controller
from esper.tasks.dataset import TaskData
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
        order = self._data.order(self._seed, self._epoch)
        crops = self._data.crops(self._seed, self._epoch)
        for start in range(0, len(order), self._batch_size):
            part = slice(start, start + self._batch_size)
            yield self._data.batch("train", order[part], None if crops is None else crops[part])

    def calibration_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the whole training set in one order for all epochs, in batches of about equal size.

        An epoch of `samples_per_step` may leave samples out and have others twice.
        """
        size = self._data.size("train")
        whole = dataclasses.replace(self._data, samples_per_step=size)
        order, crops = whole.order(self._seed, 1), whole.crops(self._seed, 1)
        count = -(-size // self._batch_size)
        for number in range(count):
            # No last batch of one sample, which has no variance.
            part = slice(number * size // count, (number + 1) * size // count)
            yield whole.batch("train", order[part], None if crops is None else crops[part])


class FixedBatches:
    """The same samples in the same order each time."""

    def __init__(
        self, data: TaskData, split: Split, *, subset: bool = False, batch_size: int = 256
    ) -> None:
        """Serve a whole split, or the fixed validation subset used while growing."""
        self._indices = data.subset if subset else data.indices(split)
        self._data = data
        self._split: Split = split
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._indices.split(self._batch_size):
            yield self._data.batch(self._split, indices)


def data_run(
    model: nn.Module,
    slots: SlotNames,
    data: TaskData,
    *,
    config: GrowthConfig,
    axes: DeclaredAxes | None = None,
    controller: str | Controller = DEFAULT_CONTROLLER,
    name: str = "model",
) -> GrowthRun:
    """Return the run that grows a model on data held by Esper: reproducible and resumable."""
    facts = config.gardener.told(
        train_samples=data.size("train"), samples_per_epoch=data.samples_per_step
    )
    config = config.replace(gardener=facts)
    run = GrowthRun(
        model,
        slots=slots,
        train=TrainingBatches(data, config.training.batch_size, config.seed),
        val=FixedBatches(data, "val", subset=True),
        test=FixedBatches(data, "test"),
        axes=axes,
        loss=data.objective,
        config=config,
        controller=controller,
        name=name,
        device=data.device,
    )
    if data.objective == "classification":
        args, kwargs = call_arguments(run.example_input)
        with evaluating(run.garden), torch.no_grad():
            scores = predictions(run.garden(*args, **kwargs))
        refuse_labels(scores, torch.arange(data.num_classes or 1))
    return run


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
        axes=USUAL_AXES[task.topology],
        controller=controller,
        name=task.name,
    )


def task_config(task: Task, **changes: Any) -> GrowthConfig:
    """Return the settings a task asks for, with some changed; its twin runs by default."""
    settings = task.config
    base = GrowthConfig(epochs=settings.horizon, twin=True, training=settings.training)
    gardener = base.gardener.replace(
        param_budget=settings.param_budget,
        chance_loss=settings.baseline_loss,
        num_classes=settings.num_classes or 0,
    )
    limits = {}
    if task.param_limit != NO_LIMIT:
        limits["max_parameters"] = task.param_limit
    if task.flop_limit != NO_LIMIT:
        # 0 would be no limit; nothing that is counted costs as little as 1.
        limits["max_added_flops"] = max(1, task.flop_limit - task.host_flops)
    chosen = {"gardener": gardener, "garden": base.garden.limited(**limits), **changes}
    return base.replace(**chosen)
