"""Optimizers and schedules as their owners have them: an instance, or how to make one.

A twin needs an optimizer of its own: one that was given as an instance is copied, with the twin's
parameters in the places of the network's.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.kasmina.garden import Garden
from esper.kasmina.trainee import SchedulerFactory
from esper.leyline.errors import UsageError
from esper.leyline.explaining import explaining

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Takes all parameters of a network that has not grown yet; those of seeds join by themselves."""

MakeOptimizer = Callable[[Garden], Optimizer]
"""Returns the optimizer of a garden, or of its twin."""


def optimizer_maker(given: Optimizer | OptimizerFactory, model: nn.Module) -> MakeOptimizer:
    """Return how to come by the optimizer of a garden around this model, or around a copy of it."""
    if isinstance(given, Optimizer):
        return _instance_maker(given, model)
    if not callable(given):
        raise UsageError(
            "optimizer must be an optimizer, or a function from parameters to one such as "
            f"torch.optim.AdamW, got {given!r}"
        )

    def make(garden: Garden) -> Optimizer:
        parameters = list(garden.parameters())
        problem = "the optimizer cannot be made of the model's parameters"
        if not any(parameter.requires_grad for parameter in parameters):
            problem += (
                ", which are all frozen (leave none of them out: they stay as they are, and those "
                "of seeds join them)"
            )
        with explaining(problem):
            made = given(parameters)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer must return a torch.optim.Optimizer, got {type(made).__name__}"
            )
        return made

    return make


def _instance_maker(given: Optimizer, model: nn.Module) -> MakeOptimizer:
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [p for group in given.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise UsageError(
            f"the optimizer holds {len(strangers)} parameters that are not the model's; make it of "
            "model.parameters(), after the model is as it will be trained"
        )

    def make(garden: Garden) -> Optimizer:
        if garden.model is model:
            return given
        places: dict[int, Any] = {
            id(old): new
            for old, new in zip(model.parameters(), garden.model.parameters(), strict=True)
        }
        # State and seeds of the original are not wanted: the twin's own follow by name.
        fresh = type(given).__new__(type(given))
        groups = [
            {
                **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
                "params": [places[id(p)] for p in group["params"] if id(p) in places],
            }
            for group in given.param_groups
        ]
        fresh.__setstate__(
            {"defaults": given.defaults, "state": defaultdict(dict), "param_groups": groups}
        )
        return fresh

    return make


def scheduler_maker(
    given: LRScheduler | SchedulerFactory | None, optimizer: Any
) -> SchedulerFactory | None:
    """Return how to come by the schedule of an optimizer, or of its twin's."""
    if given is None:
        return None
    if isinstance(given, LRScheduler):
        if given.optimizer is not optimizer:
            raise UsageError(
                "the scheduler belongs to another optimizer; give its optimizer too, or a function "
                "such as lambda optimizer: CosineAnnealingLR(optimizer, 60)"
            )

        def copied(of: Optimizer) -> LRScheduler:
            if of is given.optimizer:
                return given
            return copy.deepcopy(given, {id(given.optimizer): of})

        return copied
    if not callable(given):
        raise UsageError(
            "scheduler must be a schedule of torch.optim.lr_scheduler, or a function from the "
            f"optimizer to one, got {given!r}"
        )

    def make(of: Optimizer) -> LRScheduler:
        with explaining("the scheduler cannot be made of the optimizer"):
            made = given(of)
        if not callable(getattr(made, "step", None)):
            raise UsageError(f"scheduler must return a schedule, got {type(made).__name__}")
        return made

    return make
