"""What growing costs: size, occupied slots, sudden changes, rollbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import BLENDED_STAGES, SeedStage
from esper.simic.rewards.contract import Changes, StepView

RENT_WEIGHT = 0.5  # Factor of the logarithm of the growth.
SLOT_SHARE = 0.0039  # Overhead of a blended slot, as a share of the host.
BASIC_PARAM_WEIGHT = 0.1  # `basic`: cost per step of the whole budget in use.
LOSS_RENT_FREE = 3  # `loss`: age up to which a seed pays no rent.
LOSS_RENT_LIMIT = 5.0  # `loss`: largest rent of one step.
FREE_SEEDS = 1  # Seeds that occupy a slot at no cost.
SHOCK_WEIGHT = 0.1958  # Factor of the squared change times the size.
SHOCK_MIN_HOST = 200.0  # Host parameters that are assumed at least.
ROLLBACK_PENALTY = 10.0  # Cost of a rollback, which ends the row, in every mode but `twin`.
TWIN_ROLLBACK_PENALTY = 1.0  # `twin`: cost of a rollback beside the gain that is lost.
AUTO_PRUNE = 0.2  # Cost per seed the governor removed.


@dataclass(frozen=True, kw_only=True)
class RentConfig(Config):
    """Cost of the parameters in use."""

    limit: float = option(1.5, "Largest rent of one step.", minimum=0.0)
    min_host: float = option(200.0, "Host parameters that are assumed at least.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class OccupancyConfig(Config):
    """Cost of slots that hold a seed."""

    per_seed: float = option(0.01, "Cost of each live or fossilized seed.", minimum=0.0)
    per_fossil: float = option(0.002, "Further cost of each fossil.", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class ShockConfig(Config):
    """Cost of sudden changes of amplitude."""

    limit: float | None = option(1.0, "Largest cost of one step; nothing is no limit.", minimum=0.0)


def effective_params(signals: Signals) -> Tensor:
    """Return float32 [R]: parameters of blended seeds by amplitude, with each slot's overhead."""
    blended = is_in(signals.stage, BLENDED_STAGES)
    overhead = SLOT_SHARE * signals.host_params.float()[:, None]
    used = overhead + signals.alpha * signals.slot_params.float()
    return torch.where(blended, used, 0.0).sum(1)


def rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth in use in the epoch of the step."""
    config, after = view.config.rent, view.after
    host = after.host_params.float().clamp(min=max(config.min_host, 1.0))
    owed = RENT_WEIGHT * torch.log1p(effective_params(after) / host)
    return -owed.clamp(max=config.limit)


def twin_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: added parameters and operations per sample.

    Doubling either costs a number of points over a whole episode.
    """
    config, after = view.config.twin, view.after
    steps = (after.max_epochs - 1).clamp(min=1)
    added = (after.params - after.host_params) / after.host_params.clamp(min=1)
    added_flops = (after.flops - after.host_flops) / after.host_flops.clamp(min=1)
    by_params = -config.rent_points * added / steps
    return by_params - config.flop_rent_points * added_flops / steps


def budget_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: parameters in use as a share of the budget (`basic`)."""
    used = effective_params(view.after)
    return -BASIC_PARAM_WEIGHT * used / view.after.budget.clamp(min=1)


def growth_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth by seeds past their grace (`loss`)."""
    after = view.after
    pays = view.has_module & (after.age > LOSS_RENT_FREE)
    growth = torch.where(pays, after.slot_params, 0).sum(1) / after.host_params.clamp(min=1)
    owed = view.config.loss.rent_weight * torch.log1p(growth)
    return -owed.clamp(max=LOSS_RENT_LIMIT)


def occupancy(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that are there, beyond the free ones; cooling slots are free."""
    config = view.config.occupancy
    seeds = view.has_module.sum(1)
    fossils = (view.after.stage == int(SeedStage.FOSSILIZED)).sum(1)
    return -config.per_seed * (seeds - FREE_SEEDS).clamp(min=0) - config.per_fossil * fossils


def shock(view: StepView) -> Tensor:
    """Return [R], 0 or less: squared changes of alpha, weighted by the size of the seed."""
    limit = view.config.shock.limit
    change = view.after.alpha - view.before.alpha
    host = view.before.host_params.float().clamp(min=SHOCK_MIN_HOST)
    size = view.before.slot_params.float() / host[:, None]
    cost = SHOCK_WEIGHT * (change.square() * size).sum(1)
    return -(cost if limit is None else cost.clamp(max=limit))


def rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the penalty, in the step that was rolled back."""
    return torch.where(view.rolled_back, -ROLLBACK_PENALTY, 0.0)


def twin_rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the same for `twin`, beside the gain that is lost."""
    return torch.where(view.rolled_back, -TWIN_ROLLBACK_PENALTY, 0.0)


def auto_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds the governor removed."""
    removed = (view.had_module & ~view.has_module).sum(1)
    return torch.where(view.rolled_back, -AUTO_PRUNE * removed, 0.0)


# ---- Hindsight: what a fossil owes to the seeds that boosted it while it grew


HINDSIGHT_WEIGHT = 0.1  # Largest credit of one recorded boost.
HINDSIGHT_STEEPNESS = 0.1  # Scale of boost times improvement inside tanh.
HINDSIGHT_LIMIT = 0.2  # Largest credit of one fossilization.


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
    rows = torch.arange(view.before.rows, device=view.op.device)
    # [R, scaffold, epoch] of the slot the action is about.
    boosts = view.memory.boosts[rows, :, view.transition.actions["slot"]]
    improvement = torch.where(view.did(LifecycleOp.FOSSILIZE), view.improvement, 0.0).sum(1)
    earns = improvement > 0
    entry = (boosts > 0) & earns[:, None, None]
    epochs = torch.arange(boosts.shape[-1], device=boosts.device)
    age = (view.before.epoch[:, None] - epochs).clamp(min=0)[:, None, :]
    size = torch.tanh(HINDSIGHT_STEEPNESS * boosts * improvement[:, None, None])
    credit = torch.where(entry, HINDSIGHT_WEIGHT * size * view.config.gamma**age, 0.0).sum((1, 2))
    delay = torch.where(entry, age, 0).sum((1, 2)) / entry.sum((1, 2))
    return Credit(
        amount=credit.clamp(max=HINDSIGHT_LIMIT),
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
