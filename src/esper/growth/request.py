"""GrowRequest: one network to grow, with the settings it is grown by and what only a program has.

`esper.grow` makes one of its arguments, the command `esper grow` of its options, and both hand it
to `esper.growth.grow.carry_out`.
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
from esper.growth.criterion import Loss
from esper.growth.depth.rules import DeepenConfig
from esper.growth.fingerprints import data_contents, fingerprint, function_contents, model_contents
from esper.growth.gardener import DEFAULT_CONTROLLER, GardenerConfig
from esper.growth.kept import Keep
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.slots.placement import DeclaredAxes, Placed, SlotNames
from esper.kasmina.state import SlotState
from esper.kasmina.training import SchedulerEvery, SchedulerFactory, TrainingConfig
from esper.leyline.config import Config, option
from esper.leyline.controller import Controller
from esper.leyline.errors import ConfigError, UsageError, unknown_name
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


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(Config):
    """How one network is grown."""

    epochs: int = option(60, "Epochs of the whole run.", minimum=1)
    seed: int = option(0, "Seed of the whole run.", minimum=0)
    decide_every: int = option(
        0, "Training steps that count as an epoch; 0: one pass over the training set.", minimum=0
    )
    twin: bool = option(False, "Also train the network that only waits, for comparison.")
    keep: Keep = option(
        "best", "Which network is returned, of the twin alike: the best validated, or the last."
    )
    rewarm: int | float = option(
        0,
        "Steps, or share of the run, in which learning rates rise from 0 at its start, as for a "
        "finished network that is grown further.",
        minimum=0,
    )
    patience: int = option(
        0, "Stop after this many epochs without a better validation score; 0: never.", minimum=0
    )
    training: TrainingConfig = option(TrainingConfig, "How the network is trained.")
    garden: GardenConfig = option(GardenConfig, "The life of seeds and the limits of growth.")
    gardener: GardenerConfig = option(GardenerConfig, "How the network is measured.")
    deepen: DeepenConfig | None = option(
        None, "Let blocks sleep and wake instead of growing seeds; empty is not at all."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowRequest:
    """Everything that defines the growing of one network.

    Raises:
        UsageError: Parts of it do not go together.
    """

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

    def __post_init__(self) -> None:
        """Check what can be checked before anything is read."""
        if not isinstance(self.model, nn.Module):
            kind = type(self.model).__name__
            raise UsageError(f"the model must be a torch.nn.Module, got {kind}")
        every = self.scheduler_every
        if every not in get_args(SchedulerEvery):
            raise unknown_name("scheduler_every", every, get_args(SchedulerEvery))
        if self.scheduler is None and every != "epoch":
            raise UsageError(f"scheduler_every={every!r} is about a scheduler; give one too")
        if self.config.deepen is not None:
            self._refuse_seeds(self.config.deepen)

    def _refuse_seeds(self, deepen: DeepenConfig) -> None:
        """Refuse what is about seeds in a run that lets blocks wake instead."""
        garden = self.config.garden
        seeds = {
            "slots": self.slots != AUTO,
            "axes": self.axes is not None,
            "controller": self.controller not in (DEFAULT_CONTROLLER, "wait"),
            "max_growth": bool(garden.max_growth),
            "max_added_flops": bool(garden.max_added_flops),
            "max_seeds": bool(garden.lifecycle.rules.max_seeds),
        }
        if given := [name for name, is_given in seeds.items() if is_given]:
            hint = "deepen={'controller': ...}" if given == ["controller"] else "leave it out"
            raise UsageError(
                f"{given[0]} is about seeds, and with deepen none grow ({hint}); grow seeds in the "
                "deepened network afterwards: esper.grow(grown.model, slots=...)"
            )
        if self.config.twin and deepen.weights is not None:
            raise UsageError(
                "the twin of a deepened network is the static one with its first weights, which "
                "deepen's weights are not; leave out twin"
            )

    @property
    def controller_name(self) -> str:
        """Who decides, in a word."""
        if self.config.deepen is not None:
            return self.config.deepen.rule
        given = self.controller
        return given if isinstance(given, str) else type(given).__name__

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
