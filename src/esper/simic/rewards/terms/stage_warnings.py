"""Small costs of leaving a seed where it is: blending that hurts, holding without a decision."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.simic.rewards.terms.attribution import seed_attributions
from esper.simic.rewards.view import StepView


def blending(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that blend while the network is worse than at their start."""
    config = view.config.warning
    epochs = view.before.epochs_in_stage.float()
    cost = config.blending_base + (config.blending_slope * epochs).clamp(max=config.blending_limit)
    warned = (view.before.stage == int(SeedStage.BLENDING)) & (view.improvement < 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


def holding(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds worth keeping that are held without a decision."""
    config = view.config.warning
    epochs = view.before.epochs_in_stage
    beyond = (epochs - config.holding_free).clamp(min=0).float()
    cost = (config.holding_base + config.holding_slope * beyond).clamp(max=config.holding_limit)
    if config.holding_ops == "wait":
        undecided = (view.op == int(LifecycleOp.WAIT))[:, None]
    else:
        undecided = ~(view.did(LifecycleOp.FOSSILIZE) | view.did(LifecycleOp.PRUNE))
    warned = (view.before.stage == int(SeedStage.HOLDING)) & (epochs >= config.holding_free)
    warned = warned & undecided & (view.once(seed_attributions) > 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))
