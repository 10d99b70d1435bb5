"""GrowRequest: one network to grow, with the settings it is grown by and what only a program has.

`esper.grow` makes one of its arguments, the command `esper grow` of its options, and both hand it
to `esper.growth.grow.carry_out`.
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
"""As `slots`: those that `suggest_slots` finds."""

STARTED_BY = "started_by"
"""Key in the settings of a run that only a program can continue, with the function it called."""

CHANGEABLE = (
    "controller",
    "data",
    "device",
    "growth.epochs",
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
"""What of a growing run may become another when it is continued."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowRequest:
    """Everything that defines the growing of one network."""

    model: nn.Module
    """It is trained in place."""
    slots: SlotNames = AUTO
    """Where it may grow; with `config.deepen` nowhere."""
    placed: Placed | None = None
    """The same as it was found out before, in place of `slots` and `axes`."""
    planted: SlotState | None = None
    """What is in these slots from the first step; nothing by default."""
    train: Batches
    val: Batches
    test: Batches | None = None
    config: GrowthConfig
    axes: DeclaredAxes | None = None
    controller: str | Controller = DEFAULT_CONTROLLER
    loss: Loss | None = None
    optimizer: Optimizer | OptimizerFactory | None = None
    """Without one it is that of `config.training`, with the learning rates of `config.training`
    unless a scheduler sets them."""
    scheduler: LRScheduler | SchedulerFactory | None = None
    scheduler_every: SchedulerEvery = "epoch"
    name: str = "model"
    """What the run is called in records: its task, or the class of the model."""
    device: torch.device | str | None = None
    """Where it is trained; by default where the model is."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `config.yaml` says; a run that is continued is compared with what it was saved under."""
    renewed: Collection[str] = ()
    """Keys of `settings` that were named in order to continue with what they stand for now."""
    contents: Mapping[str, str | None] | None = None
    """Checksums, by name, of the files that the settings name; without them, what the program
    brings is looked at itself."""

    def inputs(self, example_input: Any) -> RunInputs:
        """Return what the run stands on beside its settings.

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
        """Return what is set otherwise than it was; refuse what would make it another run."""
        changed = changed_settings(saved, self.settings)
        for key, (was, now) in changed.items():
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"{key} is {was!r} in this run and cannot become {now!r} when it is continued; "
                    f"start a new run for that (what can: {', '.join(CHANGEABLE)})"
                )
        return SettingChanges(changed)
