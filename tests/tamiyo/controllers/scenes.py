"""A scripted host for tests of controllers: set what happened, then ask for the next action."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS
from esper.leyline.stages import AlphaMode, SeedStage
from esper.testing.controllers import BLUEPRINTS_BY_TOPOLOGY, check_actions, random_signals

T = TypeVar("T", Signals, Masks)

CONTEXT = ControllerContext(slot_names=("r0c0", "r0c1", "r0c2"))


def blueprint_id(name: str) -> int:
    return BUILTIN_BLUEPRINTS.index(name)


def take_rows(record: T, rows: slice) -> T:
    """Return the signals or masks of some rows."""
    return type(record)(**{each.name: getattr(record, each.name)[rows] for each in fields(record)})


def join_rows(records: list[T]) -> T:
    """Return signals or masks with the rows of all."""
    names = [each.name for each in fields(records[0])]
    return type(records[0])(
        **{name: torch.cat([getattr(record, name) for record in records]) for name in names}
    )


@dataclass
class Slot:
    """One slot; an empty one has the stage DORMANT."""

    stage: SeedStage = SeedStage.DORMANT
    blueprint: str = "conv_light"
    alpha: float = 0.0
    target: float = 0.0
    mode: AlphaMode = AlphaMode.HOLD
    algorithm: int = 0
    in_stage: int = 0
    age: int = 20
    contribution: float = math.nan
    se: float = 0.0
    counterfactual_age: int = -1
    copies: int = 0


@dataclass
class Scene:
    """One row: what a controller is shown, field by field, in plain values."""

    topology: str = "cnn"
    slots: list[Slot] = field(default_factory=lambda: [Slot(), Slot(), Slot()])
    epoch: int = 20
    horizon: int = 60
    score: float = 50.0
    best: float | None = None
    plateau: int = 5
    stabilized: bool = True
    last_op: LifecycleOp = LifecycleOp.WAIT
    last_success: bool = True
    rolled_back: bool = False
    is_frozen: bool = False
    fitting: tuple[str, ...] | None = None
    loss: float | None = None
    train_loss: float = math.nan
    flops: int = 1_000
    seed_flops: tuple[int, ...] = ()
    compute: tuple[int, int] = (-1, 0)
    rules: RulesConfig = field(default_factory=RulesConfig)

    def signals(self) -> Signals:
        template, _ = random_signals(1, len(self.slots), torch.Generator().manual_seed(0))

        def over_slots(values: list[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor([values], dtype=dtype)

        empty = [slot.stage == SeedStage.DORMANT for slot in self.slots]
        known = list(zip(self.slots, empty, strict=True))
        return replace(
            template,
            epoch=torch.tensor([self.epoch]),
            max_epochs=torch.tensor([self.horizon]),
            val_score=torch.tensor([self.score]),
            best_score=torch.tensor([self.best if self.best is not None else self.score]),
            val_loss=torch.tensor([abs(self.score)]),
            **self._learning(template),
            plateau_epochs=torch.tensor([self.plateau]),
            stabilized=torch.tensor([self.stabilized]),
            host_params=torch.tensor([0 if self.is_frozen else 1000]),
            last_op=torch.tensor([int(self.last_op)]),
            last_success=torch.tensor([self.last_success]),
            rolled_back=torch.tensor([self.rolled_back]),
            enabled=torch.ones(1, len(self.slots), dtype=torch.bool),
            occupied=~over_slots(empty, torch.bool),
            stage=over_slots([-1 if none else slot.stage for slot, none in known]),
            blueprint=over_slots(
                [-1 if none else blueprint_id(slot.blueprint) for slot, none in known]
            ),
            copies=over_slots([slot.copies for slot in self.slots]),
            alpha_mode=over_slots([-1 if none else slot.mode for slot, none in known]),
            algorithm=over_slots([-1 if none else slot.algorithm for slot, none in known]),
            alpha=over_slots([slot.alpha for slot in self.slots], torch.float32),
            alpha_target=over_slots([slot.target for slot in self.slots], torch.float32),
            epochs_in_stage=over_slots([-1 if none else slot.in_stage for slot, none in known]),
            age=over_slots([-1 if none else slot.age for slot, none in known]),
            contribution=over_slots([slot.contribution for slot in self.slots], torch.float32),
            contribution_se=over_slots([slot.se for slot in self.slots], torch.float32),
            counterfactual_age=over_slots([slot.counterfactual_age for slot in self.slots]),
        )

    def _learning(self, template: Signals) -> dict[str, torch.Tensor]:
        """Return losses and costs: the template's where the scene does not set them."""
        budget, spent = self.compute
        found = {
            "train_loss": torch.tensor([self.train_loss]),
            "flops": torch.tensor([self.flops]),
            "compute_budget": torch.tensor([budget]),
            "compute_spent": torch.tensor([spent]),
        }
        if self.loss is not None:
            found["loss_history"] = torch.tensor([[math.nan] * 4 + [self.loss]])
        if self.seed_flops:
            added = torch.tensor([self.seed_flops])[..., None]
            found["seed_flops"] = added.expand(1, len(self.slots), len(BUILTIN_BLUEPRINTS))
        return found

    def masks(self) -> Masks:
        fitting = self.fitting or BLUEPRINTS_BY_TOPOLOGY[self.topology]
        fits = torch.tensor([name in fitting for name in BUILTIN_BLUEPRINTS])
        view = RuleView(
            stage=torch.tensor([[int(slot.stage) for slot in self.slots]]),
            alpha_mode=torch.tensor([[int(slot.mode) for slot in self.slots]]),
            age=torch.tensor([[slot.age for slot in self.slots]]),
            enabled=torch.ones(1, len(self.slots), dtype=torch.bool),
            copies=torch.tensor([[slot.copies for slot in self.slots]]),
            fits=fits.expand(1, len(self.slots), -1),
        )
        return build_masks(view, self.rules)

    def act(self, controller: Controller) -> dict[str, int]:
        """Return the controller's action here, by head; it must be legal."""
        masks = self.masks()
        actions = controller.act(self.signals(), masks)
        check_actions(actions, masks)
        return {head: int(values[0]) for head, values in actions.items()}

    def op(self, controller: Controller) -> LifecycleOp:
        return LifecycleOp(self.act(controller)["op"])
