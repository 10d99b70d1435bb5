"""Bonus for live seeds that gain more together than apart."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.simic.rewards.terms.attribution import regress_discount, seed_attributions
from esper.simic.rewards.view import StepView


def synergy(view: StepView) -> Tensor:
    """Return [R]: the mean over live seeds of what their interactions earn."""
    config = view.config.synergy
    total = view.before.interaction.sum(2)
    bonus = config.weight * torch.tanh(config.steepness * total)
    sound = view.once(regress_discount) >= config.min_discount
    earns = sound & (view.once(seed_attributions) > 0) & (total > 0)
    return view.mean_over_live(torch.where(earns, bonus, 0.0))
