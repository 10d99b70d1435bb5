"""GrowRequest: everything that defines one growing run.

`esper.grow` makes one from its arguments and the command `esper grow` from its options; both give
it to `esper.growth.grow.carry_out`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from esper.leyline.errors import ConfigError
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
        for key, (was, now) in changed.items():
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"{key} is {was!r} in this run and cannot become {now!r}; start a new run, or "
                    f"change only {', '.join(CHANGEABLE)}"
                )
        return SettingChanges(changed)
