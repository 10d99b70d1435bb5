"""The governor: notices when a row's training has gone wrong, before it can poison a snapshot.

Three panics: a loss that is not finite; a loss that falls back to chance after it had been well
below it (lobotomy); a loss that explodes three epochs in a row (divergence). Pure functions over
rows; restoring a row is the business of whoever owns its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config import Config, option
from esper.leyline.rules import Worded
from esper.leyline.tensors import TensorRecord


@dataclass(frozen=True, kw_only=True)
class GovernorConfig(Config):
    """When the governor panics, and how often it takes a snapshot."""

    is_on: bool = option(True, "Whether rows are watched at all.")
    snapshot_every: int = option(5, "Epochs between snapshots.", minimum=1)
    window: int = option(20, "Losses that are remembered.", minimum=2)
    min_samples: int = option(10, "Losses needed before anything but NaN is judged.", minimum=2)
    max_loss: float = option(12.0, "A loss below this is never a divergence.", above=0.0)
    sigmas: float = option(6.0, "Standard deviations above the mean of a divergence.", above=0.0)
    factor: float = option(3.0, "Times the mean of a divergence.", above=1.0)
    patience: int = option(3, "Diverged epochs in a row that are a panic.", minimum=1)
    learned_share: float = option(
        0.6, "Share of the chance loss below which a host has learned.", above=0.0, maximum=1.0
    )
    chance_share: float = option(
        0.065, "Distance to the chance loss, as a share of it, that counts as chance.", above=0.0
    )
    most_rollbacks: int = option(
        3, "Rollbacks in a row after which growing one network gives up.", minimum=1
    )


class Panic(Worded):
    """Why a row is rolled back."""

    NONE = 0, "nothing is wrong"
    NOT_FINITE = 1, "the validation loss was not finite"
    LOBOTOMY = 2, "the network fell back to the loss of guessing"
    DIVERGENCE = 3, "the validation loss exploded"


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorState(TensorRecord):
    """What is remembered about every row."""

    losses: Tensor
    """float64 [R, window], newest last, NaN where not yet there."""
    anomalies: Tensor
    """int64 [R], diverged epochs in a row."""


def start_governing(
    rows: int, config: GovernorConfig, device: torch.device | str = "cpu"
) -> GovernorState:
    """Return the state before the first epoch."""
    unknown = torch.full((rows, config.window), math.nan, dtype=torch.float64, device=device)
    return GovernorState(
        losses=unknown, anomalies=torch.zeros(rows, dtype=torch.int64, device=device)
    )


def govern(
    state: GovernorState, loss: Tensor, chance_loss: Tensor | float, config: GovernorConfig
) -> tuple[GovernorState, Tensor]:
    """Take over one epoch's validation loss [R]; return the state and int64 [R], a `Panic`.

    `chance_loss` (one number or [R]) is that of a network that only guesses; where nobody knows it
    is NaN, which compares false.
    """
    known = torch.isfinite(state.losses)
    count = known.sum(1)
    filled = torch.where(known, state.losses, torch.zeros_like(state.losses))
    mean = filled.sum(1) / count.clamp(min=1)
    spread = torch.where(known, (state.losses - mean[:, None]).square(), torch.zeros_like(filled))
    sigma = (spread.sum(1) / count.clamp(min=1)).sqrt()
    judged = count >= config.min_samples
    finite = torch.isfinite(loss)

    had_learned = mean < config.learned_share * chance_loss
    at_chance = (loss - chance_loss).abs() < config.chance_share * chance_loss
    lobotomy = judged & had_learned & at_chance & finite
    anomaly = (
        judged
        & finite
        & (loss > config.max_loss)
        & (loss > mean + config.sigmas * sigma)
        & (loss > config.factor * mean)
    )
    anomalies = torch.where(anomaly, state.anomalies + 1, torch.zeros_like(state.anomalies))
    divergence = anomalies >= config.patience

    panic = torch.zeros_like(state.anomalies)
    panic = torch.where(divergence, int(Panic.DIVERGENCE), panic)
    panic = torch.where(lobotomy, int(Panic.LOBOTOMY), panic)
    panic = torch.where(~finite, int(Panic.NOT_FINITE), panic)

    # Anomalies and panics are no part of what is normal.
    keep = (panic == 0) & ~anomaly
    shifted = torch.cat([state.losses[:, 1:], loss[:, None]], 1)
    losses = torch.where(keep[:, None], shifted, state.losses)
    anomalies = torch.where(panic != 0, torch.zeros_like(anomalies), anomalies)
    return GovernorState(losses=losses, anomalies=anomalies), panic
