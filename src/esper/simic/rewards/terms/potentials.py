"""Shaping by stage potentials: it moves reward in time and adds none.

The potential of a row is the sum over its slots and a function of the state alone; after the last
step of an episode it is 0. So the discounted sum of the shaping over an episode is minus the
potential it started with, which is 0, whatever the controller does: no bonus for a stage is needed
beside it, none has to be taken back, and none can be farmed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.simic.rewards.config import PotentialConfig
from esper.simic.rewards.view import StepView


def potential(signals: Signals, config: PotentialConfig) -> Tensor:
    """Return [R]: stages and epochs in them, summed over the slots that hold a seed."""
    levels = {
        SeedStage.GERMINATED: config.germinated,
        SeedStage.TRAINING: config.training,
        SeedStage.BLENDING: config.blending,
        SeedStage.HOLDING: config.holding,
        SeedStage.FOSSILIZED: config.fossilized,
    }
    epochs = signals.epochs_in_stage.float()
    progress = (config.progress_rate * epochs).clamp(max=config.progress_limit)
    total = torch.zeros_like(progress)
    for stage, level in levels.items():
        total = torch.where(signals.stage == int(stage), level + progress, total)
    return total.sum(1)


def shape(view: StepView, config: PotentialConfig) -> Tensor:
    """Return [R]: scale * (gamma * potential after - potential before), 0 potential at the end."""
    later = torch.where(view.ended, 0.0, potential(view.after, config))
    return config.scale * (view.config.gamma * later - potential(view.before, config))


def pbrs(view: StepView) -> Tensor:
    """Return [R]: shaping by the configured potentials."""
    return shape(view, view.config.potential)


def loss_pbrs(view: StepView) -> Tensor:
    """Return [R]: shaping by stages alone, on the scale of `loss`."""
    config = view.config.potential.replace(
        scale=view.config.loss.potential_scale, progress_rate=0.0
    )
    return shape(view, config)
