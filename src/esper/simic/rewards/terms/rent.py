"""Costs of size: the parameters in use and the slots they occupy."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import BLENDED_STAGES, SeedStage
from esper.simic.rewards.config import RentConfig
from esper.simic.rewards.view import StepView


def effective_params(signals: Signals, config: RentConfig) -> Tensor:
    """Return float32 [R]: parameters of blended seeds by amplitude, with each slot's overhead."""
    blended = is_in(signals.stage, BLENDED_STAGES)
    overhead = config.slot_share * signals.host_params.float()[:, None]
    used = overhead + signals.alpha * signals.slot_params.float()
    return torch.where(blended, used, 0.0).sum(1)


def rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth in use in the epoch of the step."""
    config = view.config.rent
    host = view.after.host_params.float().clamp(min=max(config.min_host, 1.0))
    growth = effective_params(view.after, config) / host
    return -(config.weight * torch.log1p(growth)).clamp(max=config.limit)


def twin_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: added parameters, so that doubling them costs a number of points."""
    config = view.config.twin
    after = view.after
    steps = (after.max_epochs - 1).clamp(min=1)
    added = (after.params - after.host_params) / after.host_params.clamp(min=1)
    return -config.rent_points / config.scale * added / steps


def budget_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: parameters in use as a share of the budget (`basic`)."""
    used = effective_params(view.after, view.config.rent)
    return -view.config.basic.param_weight * used / view.after.budget.clamp(min=1)


def occupancy(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that are there, beyond the free ones; cooling slots are free."""
    config = view.config.occupancy
    seeds = view.has_module.sum(1)
    fossils = (view.after.stage == int(SeedStage.FOSSILIZED)).sum(1)
    return -config.per_seed * (seeds - config.free_seeds).clamp(min=0) - config.per_fossil * fossils


def growth_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth by seeds past their grace (`loss`)."""
    config, after = view.config.loss, view.after
    pays = view.has_module & (after.age > config.rent_free)
    added = torch.where(pays, after.slot_params, 0).sum(1)
    growth = added / after.host_params.clamp(min=1)
    return -(config.rent_weight * torch.log1p(growth)).clamp(max=config.rent_limit)
