"""The documents' name for the rollout and the training loop around it."""

from __future__ import annotations

from esper.simic.training.rollout import Rollout
from esper.simic.training.trainer import Trainer

__all__ = ["Rollout", "Trainer"]
