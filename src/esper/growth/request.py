"""GrowRequest: everything that defines one growing run.

`esper.grow` makes one from its arguments and the command `esper grow` from its options; both give
it to `esper.growth.grow.carry_out`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.batches import Batches, OptimizerFactory
from esper.growth.config import DEFAULT_CONTROLLER, GrowthConfig
from esper.growth.criterion import Loss
from esper.growth.fingerprints import data_contents, fingerprint, function_contents, model_contents
from esper.kasmina.slots.placement import DeclaredAxes, Placed, SlotNames
from esper.kasmina.state import SlotState
from esper.kasmina.training import SchedulerEvery, SchedulerFactory
from esper.leyline.controller import Controller
from esper.leyline.errors import ConfigError, UsageError, unknown_name
from esper.nissa.recorded import RunInputs
from esper.utils.settings import SettingChanges, changed_settings

AUTO = "auto"
"""Value of `slots` that stands for those of `suggest_slots`."""

STARTED_BY = "started_by"
"""Key in the settings of a run that only a program can continue: the function it called."""

CHANGEABLE = (
    "controller",
    "data",
    "device",
    "growth.epochs",
    "growth.budget",
    "growth.keep",
    "growth.patience",
    "growth.training.learning_rate",
    "growth.training.schedule",
    "growth.training.batch_size",
    "growth.training.max_grad_norm",
    "growth.garden.lifecycle.rules.max_seeds",
    "growth.garden.max_growth",
    "growth.garden.max_parameters",
    "growth.garden.max_added_flops",
    "growth.gardener.ablate_every",
)
"""Settings that may change when a growing run is continued."""


_MOST_NAMED = 3
"""Most settings that an error lists beside the first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowRequest:
    """Everything that defines the growing of one network."""

    model: nn.Module
    """Trained in place."""
    slots: SlotNames = AUTO
    """Where it may grow; ignored with `config.deepen`."""
    placed: Placed | None = None
    """Slots found before, instead of `slots` and `axes`."""
    planted: SlotState | None = None
    """Seeds in these slots from the first step; by default none."""
    train: Batches
    val: Batches
    test: Batches | None = None
    config: GrowthConfig
    axes: DeclaredAxes | None = None
    controller: str | Controller = DEFAULT_CONTROLLER
    loss: Loss | None = None
    optimizer: Optimizer | OptimizerFactory | None = None
    """By default that of `config.training`."""
    scheduler: LRScheduler | SchedulerFactory | None = None
    scheduler_every: SchedulerEvery = "epoch"
    name: str = "model"
    """Name of the run in records: its task, or the class of the model."""
    device: torch.device | str | None = None
    """Where to train; by default where the model is."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Content of `config.yaml`; a continued run is compared with the settings it was saved with."""
    renewed: Collection[str] = ()
    """Keys of `settings` whose files or modules may have changed since the run was saved."""
    contents: Mapping[str, str | None] | None = None
    """Checksums of the files that the settings name; None takes them of the objects themselves."""

    @property
    def controller_name(self) -> str:
        """The name of who decides, for records."""
        if self.config.deepen is not None:
            return self.config.deepen.rule
        given = self.controller
        return given if isinstance(given, str) else type(given).__name__

    def inputs(self, example_input: Any) -> RunInputs:
        """Return checksums of data, model and functions, and the versions of software.

        Args:
            example_input: inputs of the first validation batch.
        """
        found = self.contents
        if found is None:
            depth = self.config.deepen
            functions = {
                "loss": self.loss,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "rule of depth": None if depth is None else depth.controller,
            }
            found = {
                "first validation batch": fingerprint(example_input),
                **data_contents("training", self.train),
                **data_contents("validation", self.val),
                **data_contents("test", self.test),
            }
            for name, value in functions.items():
                found |= function_contents(name, value)
        return RunInputs.now({**found, **model_contents(self.model)})

    def changes_since(self, saved: Mapping[str, Any]) -> SettingChanges:
        """Return the settings that changed; refuse those that must not."""
        changed = changed_settings(saved, self.settings)
        refused = [key for key in changed if key not in CHANGEABLE]
        if refused:
            key, *others = refused
            was, now = changed[key]
            more = ""
            if others:
                named = ", ".join(others[:_MOST_NAMED])
                more = f" (and {len(others)} more that may not change: {named}"
                more += ", …)" if len(others) > _MOST_NAMED else ")"
            raise ConfigError(
                f"{key} is {was!r} in this run and cannot become {now!r}{more}; start a new "
                "run, or leave it as it is (the page Settings lists the "
                f"{len(CHANGEABLE)} settings that may change)"
            )
        return SettingChanges(changed)


def check_request(request: GrowRequest) -> None:
    """Refuse arguments that contradict each other, before any data is read."""
    every, known = request.scheduler_every, get_args(SchedulerEvery)
    if every not in known:
        raise unknown_name("scheduler_every", every, known)
    if request.config.budget is not None and every == "batch":
        raise UsageError(
            "scheduler_every='batch' needs to know how many steps the run has, which a budget "
            "leaves open; step the scheduler every epoch: epochs are equal shares of the budget"
        )
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
