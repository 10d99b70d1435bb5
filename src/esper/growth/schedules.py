"""The user's learning rate schedule: an instance, or a function that makes one, and its length."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, PolynomialLR

from esper.growth.batches import Batches, explaining
from esper.kasmina.training import SchedulerEvery, SchedulerFactory
from esper.leyline.errors import UsageError, warn

_LENGTHS: dict[type[LRScheduler], str] = {
    OneCycleLR: "total_steps",
    CosineAnnealingLR: "T_max",
    PolynomialLR: "total_iters",
}
"""Attribute that holds the number of steps of a schedule, by its class."""


def scheduler_maker(
    given: LRScheduler | SchedulerFactory | None, optimizer: Any
) -> SchedulerFactory | None:
    """Return what makes the schedule of an optimizer, or of its twin's."""
    if given is None:
        return None
    if isinstance(given, LRScheduler):
        if given.optimizer is not optimizer:
            raise UsageError(
                "the scheduler belongs to another optimizer; give optimizer= that one, or write "
                "scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 60)"
            )

        def copied(of: Optimizer) -> LRScheduler:
            if of is given.optimizer:
                return given
            return copy.deepcopy(given, {id(given.optimizer): of})

        return copied
    if not callable(given):
        raise UsageError(
            "scheduler must be one of torch.optim.lr_scheduler, or a function that makes one of "
            f"an optimizer, got {given!r}; write scheduler=lambda optimizer: "
            "CosineAnnealingLR(optimizer, 60)"
        )

    def make(of: Optimizer) -> LRScheduler:
        with explaining("the scheduler cannot be made from the optimizer"):
            made = given(of)
        if not callable(getattr(made, "step", None)):
            raise UsageError(
                f"scheduler must return a schedule, got {type(made).__name__}; write "
                "scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 60)"
            )
        return made

    return make


def check_schedule(
    schedule: LRScheduler | None, every: SchedulerEvery, epochs: int, train: Batches
) -> None:
    """Refuse a schedule of another length than the run, or warn, where its length is known.

    A `OneCycleLR` that is too short would fail on the way. A schedule with a step for each batch
    hardly moves if it is stepped after every epoch.
    """
    kind = next((kind for kind in _LENGTHS if isinstance(schedule, kind)), None)
    if kind is None or (every == "batch" and not isinstance(train, Sized)):
        return
    argument = _LENGTHS[kind]
    steps = int(getattr(schedule, argument))
    batches = len(train) if isinstance(train, Sized) else 1
    each = batches if every == "batch" else 1
    needed = epochs * each
    if kind is OneCycleLR and steps < needed:
        raise UsageError(
            f"OneCycleLR has {steps} steps, but the run takes {needed} ({epochs} "
            f"epochs of {each}); write total_steps={needed}"
        )
    if every == "batch" or batches == 1 or epochs == 1:
        return
    problem = f"{kind.__name__} has {steps} steps, but is stepped {epochs} times, once an epoch"
    if steps == epochs * batches:
        raise UsageError(f"{problem}; write scheduler_every='batch'")
    if steps > epochs * batches or (kind is OneCycleLR and steps > epochs):
        warn(f"{problem}; write {argument}={epochs}, or scheduler_every='batch'")
