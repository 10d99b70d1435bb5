"""`check_task`: the contract of a task as a function anyone can run on a task of their own."""

from __future__ import annotations

import torch

from esper.leyline.errors import UsageError
from esper.tasks.splits import SPLITS
from esper.tasks.task import DataPath, Task, TaskConfig, get_task
from esper.testing.hosts import check_host

CHECKED_SAMPLES = 8


def check_task(name: str, data_path: DataPath | None = None) -> None:
    """Raise with one line if a registered task breaks the contract.

    Args:
        name: The name it is registered under.
        data_path: Where its data lies; None for the usual places.
    """
    task = get_task(name)
    config = task.config
    if TaskConfig.from_mapping(config.to_mapping()) != config:
        raise UsageError(f"task {name!r}: its configuration does not survive being written down")
    check_host(config.host, config.host_options, task.example_input(2))
    first, second = task.load(data_path), task.load(data_path)
    for split in SPLITS:
        if not torch.equal(first.splits.samples[split], second.splits.samples[split]):
            raise UsageError(f"task {name!r}: two loads give different {split} splits")
    order = first.order(0, 1)
    if not torch.equal(order, second.order(0, 1)) or len(order) != config.samples_per_step:
        raise UsageError(
            f"task {name!r}: an epoch must be {config.samples_per_step} samples fixed by its keys"
        )
    x, y = first.batch("train", order[:CHECKED_SAMPLES])
    if x.dtype != task.example_input().dtype or x.shape[1:] != config.input_shape:
        raise UsageError(
            f"task {name!r}: a batch has shape {tuple(x.shape)} and type {x.dtype}, "
            f"but example_input() promises {config.input_shape} of {task.example_input().dtype}"
        )
    _check_step(task, x, y)


def _check_step(task: Task, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take one optimizer step and see that the loss is finite and every parameter takes part."""
    host = task.build_host(0)
    loss, correct = task.objective(host(x), y)
    if loss.shape != x.shape[:1] or not bool(loss.isfinite().all()):
        raise UsageError(f"task {task.name!r}: the objective must give one finite loss per sample")
    if (correct is None) != (task.score_kind == "negative_loss"):
        raise UsageError(f"task {task.name!r}: correctness and the kind of score do not agree")
    loss.mean().backward()
    if any(p.grad is None or not bool(p.grad.isfinite().all()) for p in host.parameters()):
        raise UsageError(f"task {task.name!r}: the loss does not reach every parameter")
