"""Hindsight: what a fossil owes to the seeds that boosted it while it grew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.simic.rewards.view import Changes, StepView


@dataclass(frozen=True, kw_only=True)
class HindsightConfig(Config):
    """Credit for seeds that helped another one to fossilize."""

    weight: float = option(0.1, "Largest credit of one recorded boost.", minimum=0.0)
    steepness: float = option(0.1, "Scale of boost times improvement inside tanh.", minimum=0.0)
    limit: float = option(0.2, "Largest credit of one fossilization.", minimum=0.0)


@dataclass(frozen=True, slots=True)
class Credit:
    """What a fossilization earned in hindsight; float32 [R]."""

    amount: Tensor
    """The credit, 0 where nothing was earned."""
    scaffolds: Tensor
    """How many slots held a scaffold of the fossil."""
    delay: Tensor
    """Mean age of the boosts in epochs, NaN where there are none."""


def earned_credit(view: StepView) -> Credit:
    """Return what this step's fossilization, if any, earned."""
    config = view.config.hindsight
    rows = torch.arange(view.before.rows, device=view.op.device)
    # [R, scaffold, epoch] of the slot the action is about.
    boosts = view.memory.boosts[rows, :, view.transition.actions["slot"]]
    improvement = torch.where(view.did(LifecycleOp.FOSSILIZE), view.improvement, 0.0).sum(1)
    earns = improvement > 0
    entry = (boosts > 0) & earns[:, None, None]
    epochs = torch.arange(boosts.shape[-1], device=boosts.device)
    age = (view.before.epoch[:, None] - epochs).clamp(min=0)[:, None, :]
    size = torch.tanh(config.steepness * boosts * improvement[:, None, None])
    credit = torch.where(entry, config.weight * size * view.config.gamma**age, 0.0).sum((1, 2))
    delay = torch.where(entry, age, 0).sum((1, 2)) / entry.sum((1, 2))
    return Credit(
        amount=credit.clamp(max=config.limit),
        scaffolds=entry.any(2).sum(1).float(),
        delay=delay,
    )


def hindsight(view: StepView) -> Tensor:
    """Return [R]: credit earned in the step before, or in this one if it is the last."""
    earned = view.once(earned_credit).amount
    return view.memory.pending + torch.where(view.ended, earned, 0.0)


def follow_scaffolds(view: StepView) -> Changes:
    """Write this epoch's boosts into the ledger and strike out those that are settled."""
    memory, after = view.memory, view.after
    # Boosts of a seed that is fossilized are credited; those of one that is gone are void.
    kept = view.has_module & ~view.did(LifecycleOp.FOSSILIZE)
    boosts = torch.where(kept[:, None, :, None], memory.boosts, 0.0)
    # Rows whose own episode is over may live on beside longer ones.
    epoch = after.epoch.clamp(max=boosts.shape[-1] - 1)
    index = epoch[:, None, None, None].expand(*boosts.shape[:3], 1)
    fresh = torch.where(kept[:, None, :], after.interaction, 0.0).clamp(min=0)
    earned = view.once(earned_credit).amount
    return {
        "boosts": boosts.scatter(3, index, fresh.unsqueeze(3)),
        "pending": torch.where(view.ended, 0.0, earned),
    }


def describe_hindsight(view: StepView) -> Mapping[str, Tensor]:
    """Return the credit this step earned, with its scaffolds and their delay, paid or not."""
    credit = view.once(earned_credit)
    return {
        "hindsight_credit": credit.amount,
        "scaffold_count": credit.scaffolds,
        "scaffold_delay": credit.delay,
    }
