"""What a rollback by the governor costs. It ends the row."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.simic.rewards.view import StepView


def rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the penalty, in the step that was rolled back."""
    return torch.where(view.rolled_back, -view.config.governor.rollback_penalty, 0.0)


def twin_rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the same for `twin`, beside the gain that is lost."""
    return torch.where(view.rolled_back, -view.config.twin.rollback_penalty, 0.0)


def auto_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds the governor removed."""
    removed = (view.had_module & ~view.has_module).sum(1)
    return torch.where(view.rolled_back, -view.config.governor.auto_prune * removed, 0.0)
