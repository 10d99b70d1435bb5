"""Settings of one growing network, and what follows from them at the start of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from esper.growth.depth.rules import DeepenConfig
from esper.kasmina.blueprints.registry import (
    blueprint_kinds,
    blueprint_names,
    copied_names,
    drawn_names,
)
from esper.kasmina.budget import parse_budget
from esper.kasmina.costs import NO_LIMIT, as_options, times_host
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.recalibration import DEFAULT_SAMPLES
from esper.kasmina.row_group import RowConfig
from esper.kasmina.signals import RateTable, RowFacts, TrackerConfig, row_facts
from esper.kasmina.training import TrainingConfig, rate_factor
from esper.leyline.config import Config, option
from esper.leyline.controller import (
    LEAST_SHARE,
    Controller,
    ControllerContext,
    Limited,
    is_too_short,
)
from esper.leyline.errors import ConfigError
from esper.leyline.slots import NOOP
from esper.tamiyo.controllers import (
    HeuristicController,
    LearnedController,
    TamiyoController,
    WaitController,
)

DEFAULT_CONTROLLER = "tamiyo"

Keep = Literal["best", "last"]
"""Which network a run returns: that of the best validated epoch, or that of the last."""


@dataclass(frozen=True, kw_only=True)
class GardenerConfig(RowConfig):
    """How often a gardener measures, what it tells the controller, and when it rolls back."""

    param_budget: int = option(
        500_000, "Parameters that count as a full budget in the observation.", minimum=1
    )
    chance_loss: float = option(
        0.0,
        "Loss of a network that only guesses; 0: that of `num_classes`, or unknown.",
        minimum=0.0,
    )
    train_samples: int = option(0, "Samples of the training set; 0: unknown.", minimum=0)
    samples_per_epoch: int = option(0, "Samples trained on in one epoch; 0: unknown.", minimum=0)
    num_classes: int = option(0, "Classes or distinct tokens; 0: none, or unknown.", minimum=0)
    val_is_sharded: bool = option(
        False,
        "In several processes: each evaluates other samples, which are joined. "
        "Otherwise all evaluate the same, and rank 0 counts.",
    )
    statistics_samples: int = option(
        DEFAULT_SAMPLES,
        "Most training samples for recomputing BatchNorm statistics before an epoch is measured; "
        "0 keeps those of training.",
        minimum=0,
    )
    fits_horizon: bool = option(
        True, "In a run of less than 60 epochs, shorten the waits in proportion."
    )

    def with_task_facts(self, **facts: float) -> GardenerConfig:
        """Return the settings with these facts about the task, where they lack them."""
        return self.replace(**{name: v for name, v in facts.items() if not getattr(self, name)})

    def task_facts(self, horizon: int) -> RowFacts:
        """Return the facts about the task that a controller sees."""
        guess = math.log(self.num_classes) if self.num_classes > 1 else math.nan
        return row_facts(
            1,
            horizon=horizon,
            budget=self.param_budget,
            chance_loss=self.chance_loss or guess,
            train_samples=self.train_samples,
            samples_per_epoch=self.samples_per_epoch,
            num_classes=self.num_classes,
        )


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(Config):
    """How one network is grown."""

    epochs: int = option(60, "Epochs of the whole run.", minimum=1)
    seed: int = option(0, "Seed of the whole run.", minimum=0)
    decide_every: int = option(
        0, "Training steps that count as an epoch; 0: one pass over the training set.", minimum=0
    )
    budget: float | str | None = option(
        None,
        "Training FLOPs of the whole run, such as 2e12, or a multiple of what the model would take "
        "for all epochs, such as 10x. Every epoch is then an equal share of them: a small network "
        "takes more steps than a grown one; empty is no budget.",
    )
    twin: bool = option(False, "Also train the un-grown twin, for comparison.")
    keep: Keep = option(
        "best", "Which network, and which twin, is returned: the best validated, or the last."
    )
    rewarm: int | float = option(
        0,
        "Steps (a whole number), or share of the run (below 1), over which learning rates rise "
        "from 0 at its start; for a finished network that is grown further.",
        minimum=0,
    )
    patience: int = option(
        0, "Stop after this many epochs without a better validation score; 0: never.", minimum=0
    )
    training: TrainingConfig = option(TrainingConfig, "How the network is trained.")
    garden: GardenConfig = option(GardenConfig, "The life of seeds and the limits of growth.")
    gardener: GardenerConfig = option(GardenerConfig, "How the network is measured.")
    deepen: DeepenConfig | None = option(
        None, "Let blocks sleep and wake instead of growing seeds; empty: no."
    )

    def __post_init__(self) -> None:
        """Check what no type can say."""
        if self.budget is not None:
            object.__setattr__(self, "budget", parse_budget(self.budget))
        super().__post_init__()
        if isinstance(self.rewarm, float) and self.rewarm >= 1:
            # 1.0 might mean the whole run, or one step.
            raise ConfigError(
                f"rewarm={self.rewarm} is neither a share of the run, below 1, nor a whole number "
                f"of steps; write rewarm=0.05 or rewarm={round(self.rewarm)}"
            )
        if self.budget is None:
            return
        others = {"decide_every": self.decide_every, "deepen": self.deepen, "rewarm": self.rewarm}
        if given := [name for name, value in others.items() if value]:
            raise ConfigError(
                f"budget does not go together with {given[0]}, which needs to know how many steps "
                "an epoch has; leave out one of them"
            )


def rates_to_come(config: GrowthConfig) -> RateTable:
    """Return the host's learning rates in all epochs of a run."""
    epochs = range(1, config.epochs + 1)
    factors = [rate_factor(config.training, epoch, config.epochs) for epoch in epochs]
    return RateTable(torch.tensor([factors]), torch.tensor([config.training.learning_rate]))


# ---- What follows from a garden and its controller at the start of a run


def controller_context(garden: Garden, seed: int) -> ControllerContext:
    """Return what a controller is told when it is made."""
    return ControllerContext(
        slot_names=garden.slot_names,
        blueprint_names=blueprint_names(),
        blueprint_kinds=blueprint_kinds(),
        copies=copied_names(),
        seed=seed,
        inert_epochs=garden.config.lifecycle.inert_epochs,
        immediate=tuple(map(tuple, garden.table.immediate.tolist())),
    )


def learned_limits(controller: Controller, garden: Garden) -> dict[str, int]:
    """Return the limits of growth that the controller learned under, where the garden has none.

    A policy that always had a limit was never measured without one; one clone germinated and
    pruned by turns.
    """
    if not isinstance(controller, Limited):
        return {}
    limits = controller.limits
    parameters = flops = NO_LIMIT
    if garden.param_limit == NO_LIMIT:
        # A host that is frozen altogether has no parameters to be a multiple of.
        parameters = times_host(limits.parameters, garden.count_host_parameters()) or NO_LIMIT
    if garden.flop_limit == NO_LIMIT and garden.placed.is_counted:
        flops = times_host(limits.flops, garden.host_flops)
    return as_options(parameters, flops, garden.host_flops)


def startup_warning(
    controller: Controller, garden: Garden, tracker: TrackerConfig, horizon: int
) -> str | None:
    """Return why a run is unlikely to grow and what to do about it; None where it may well grow.

    Args:
        controller: who will decide.
        garden: what is to grow, with the life of seeds in a run of this length.
        tracker: when the host counts as settled in such a run.
        horizon: epochs of the run.
    """
    if isinstance(controller, WaitController):
        if garden.count_parameters() or next(garden.host_parameters(), None) is None:
            return None
        return (
            "nothing trains: all parameters of the model are frozen, and the controller 'wait' "
            "grows no seed; write controller='trial', or model.requires_grad_(True)"
        )
    must_settle = isinstance(controller, HeuristicController)
    needed = (tracker.settling_epochs if must_settle else 1) + 1
    if not bool(garden.table.immediate[:, NOOP + 1 : len(drawn_names())].any()):
        needed += garden.config.lifecycle.inert_epochs
    learned = controller.policy.horizon if isinstance(controller, LearnedController) else 0
    if isinstance(controller, TamiyoController) and not garden.count_host_parameters():
        learned = 0  # It leaves frozen hosts to a rule.
    least = math.ceil(LEAST_SHARE * learned)
    if horizon < needed:
        return (
            f"{horizon} {'epoch is' if horizon == 1 else 'epochs are'} too few to grow in: the "
            f"first seed is blended in after {needed} epochs at the earliest; train for "
            f"{max(needed, least)} or more"
        )
    if is_too_short(horizon, learned):
        return (
            f"{horizon} epochs may be too few to grow in: the controller was trained on runs of "
            f"{learned} epochs or more, and may act too late; train for {least} or more, "
            "or write controller='trial'"
        )
    return None
