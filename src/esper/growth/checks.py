"""What a model and a schedule of a user's must be like before anything is trained."""

from __future__ import annotations

from collections.abc import Sized

from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from esper.growth.batches import Batches
from esper.kasmina.trainee import SchedulerEvery
from esper.leyline.errors import UsageError, warn


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model whose tensors hold no numbers."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} of the model is on the meta device, which holds no numbers; build the "
                "model on a real device, or give it weights after model.to_empty(device=...)"
            )


def refuse_short_schedule(
    schedule: LRScheduler | None, every: SchedulerEvery, epochs: int, train: Batches
) -> None:
    """Refuse a schedule that would fail on the way, before anything is trained."""
    if not isinstance(schedule, OneCycleLR) or (every == "batch" and not isinstance(train, Sized)):
        return
    each = len(train) if every == "batch" and isinstance(train, Sized) else 1
    needed = epochs * each
    if schedule.total_steps < needed:
        raise UsageError(
            f"OneCycleLR is made for {schedule.total_steps} steps, but the run steps it {needed} "
            f"times ({epochs} epochs of {each}); give total_steps={needed}"
        )


def warn_of_moving_statistics(model: nn.Module) -> None:
    """Say that a host is not as frozen as its owner may think."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            is_frozen = not module.weight.requires_grad
            if is_frozen and module.track_running_stats:
                warn(
                    f"the parameters of {name!r} are frozen, but its running statistics move while "
                    "the network trains; replace it by one that does not, or train it too"
                )
                return
