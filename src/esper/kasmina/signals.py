"""Signals for controllers, and what is tracked of rows: histories, plateau, panics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.budget import NO_BUDGET
from esper.kasmina.costs import germination_costs, standing_copies
from esper.kasmina.lifecycle import time_to_target, velocity
from esper.kasmina.slot_table import SlotTable
from esper.leyline.actions import TensorRecord
from esper.leyline.config import Config, option
from esper.leyline.controller import pace, shortened
from esper.leyline.rules import CodeWithText
from esper.leyline.signals import HISTORY, Signals

LEAST_PROGRESS = 0.1  # Progress, as a share of the first loss, that is assumed at least.
_OR_ABSENT = (
    *("stage", "blueprint", "alpha_mode", "algorithm"),
    *("epochs_in_stage", "age", "counterfactual_age"),
)
_OR_ZERO = ("alpha", "alpha_target", "grad_norm", "grad_health", "grad_health_prev")
_OR_NAN = ("contribution", "contribution_se", "contribution_velocity")
"""Fields of `SlotState` that `Signals` shows, by what stands where there is nothing to show."""

_SPAN = 3
"""Epochs over which the gain is averaged."""
_MOST_STABLE = 0.5
"""A loss that falls by more of all progress in an epoch is not stable, however short the run."""


@dataclass(frozen=True, kw_only=True)
class TrackerConfig(Config):
    """When a host counts as stuck or settled."""

    plateau_points: float = option(
        0.5, "An epoch that beats the best score by fewer points prolongs a plateau.", minimum=0.0
    )
    stable_gain: float = option(
        0.03,
        "Fall of the loss per epoch, relative to all progress, below which it is stable.",
        above=0.0,
    )
    stable_loss: float = option(
        0.05,
        "Rise of the loss per epoch, relative to all progress, below which it is stable.",
        above=0.0,
    )
    stable_epochs: int = option(
        3, "Stable epochs in a row that close the latch; 0 closes it at once.", minimum=0
    )

    @property
    def settling_epochs(self) -> int:
        """Fewest epochs after which a host can count as settled."""
        return _SPAN + self.stable_epochs if self.stable_epochs else 1

    def fitted(self, horizon: int) -> TrackerConfig:
        """Return the settings for a run of this length: in a short one everything is faster."""
        faster = pace(horizon)
        return self.replace(
            plateau_points=self.plateau_points * faster,
            stable_gain=max(self.stable_gain, min(_MOST_STABLE, self.stable_gain * faster)),
            stable_loss=max(self.stable_loss, min(_MOST_STABLE, self.stable_loss * faster)),
            stable_epochs=shortened(self.stable_epochs, horizon),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState(TensorRecord):
    """Histories and counters of every host; tensors over R rows."""

    epoch: Tensor
    """int64 [R], epochs recorded."""
    loss_history: Tensor
    """float64 [R, 5], newest last, NaN where not yet there."""
    score_history: Tensor
    """float64 [R, 5], newest last, NaN where not yet there."""
    first_loss: Tensor
    """float64 [R], NaN before the first epoch."""
    best_loss: Tensor
    """float64 [R], infinite before the first epoch."""
    best_score: Tensor
    """float64 [R], minus infinity before the first epoch."""
    plateau_epochs: Tensor
    """int64 [R]."""
    stable_run: Tensor
    """int64 [R], stable epochs in a row."""
    stabilized: Tensor
    """bool [R], the latch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Fixed facts of every row's task.

    Everything is per row, because rows that run together may be of different tasks: other data,
    another horizon. Unknown values are written as in `Signals`.
    """

    horizon: Tensor
    """int64 [R], epochs of an episode."""
    budget: Tensor
    """int64 [R], parameters that count as a full budget."""
    chance_loss: Tensor
    """float64 [R], loss of a network that only guesses, NaN where unknown."""
    train_samples: Tensor
    """int64 [R], samples of the training set, 0 where unknown."""
    samples_per_epoch: Tensor
    """int64 [R], samples trained on in one epoch, 0 where unknown."""
    num_classes: Tensor
    """int64 [R], classes or distinct tokens, 0 where there are none or unknown."""
    compute: Tensor
    """int64 [R], training FLOPs that an episode may take, `NO_BUDGET` where it has epochs alone."""
    batch_samples: Tensor
    """int64 [R], samples of an optimizer step, 0 where unknown."""
    val_samples: Tensor
    """int64 [R], samples by which an epoch is measured, 0 where unknown."""


def row_facts(
    rows: int,
    *,
    horizon: int | Tensor,
    budget: int | Tensor,
    chance_loss: float | Tensor = math.nan,
    train_samples: int | Tensor = 0,
    samples_per_epoch: int | Tensor = 0,
    num_classes: int | Tensor = 0,
    compute: int | Tensor = NO_BUDGET,
    batch_samples: int | Tensor = 0,
    val_samples: int | Tensor = 0,
    device: torch.device | str = "cpu",
) -> RowFacts:
    """Return the facts of rows; every value is for all of them or [R]."""

    def each(value: float | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=device).expand(rows)

    return RowFacts(
        horizon=each(horizon),
        budget=each(budget),
        chance_loss=each(chance_loss, torch.float64),
        train_samples=each(train_samples),
        samples_per_epoch=each(samples_per_epoch),
        num_classes=each(num_classes),
        compute=each(compute),
        batch_samples=each(batch_samples),
        val_samples=each(val_samples),
    )


Rates = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps epochs int64 [R] (1 is the first) to (share of the peak learning rate, learning rate), both
[R]; the rate is NaN where unknown."""


def unknown_rates(epochs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a share of 1 and a rate of NaN for every row."""
    ones = torch.ones(len(epochs), device=epochs.device)
    return ones, ones * math.nan


@dataclass(frozen=True, slots=True)
class RateTable:
    """`Rates` from a table; rows may have different schedules and horizons."""

    factors: Tensor
    """float32 [R, E], share of the peak in epoch 1, 2, ...; the last holds afterwards."""
    peak: Tensor
    """float32 [R], the learning rate at its highest."""

    def __call__(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and rates of these epochs."""
        column = (epochs - 1).clamp(0, self.factors.shape[1] - 1)
        factor = self.factors.gather(1, column[:, None]).squeeze(1)
        return factor, factor * self.peak


def start_tracking(
    rows: int, config: TrackerConfig, device: torch.device | str = "cpu"
) -> TrackerState:
    """Return the state before the first epoch."""

    def full(value: float, *shape: int) -> Tensor:
        return torch.full((rows, *shape), value, dtype=torch.float64, device=device)

    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    return TrackerState(
        epoch=zeros,
        loss_history=full(math.nan, HISTORY),
        score_history=full(math.nan, HISTORY),
        first_loss=full(math.nan),
        best_loss=full(math.inf),
        best_score=full(-math.inf),
        plateau_epochs=zeros,
        stable_run=zeros,
        stabilized=torch.full((rows,), config.stable_epochs == 0, device=device),
    )


def track_epoch(
    state: TrackerState, loss: Tensor, score: Tensor, config: TrackerConfig
) -> TrackerState:
    """Record one epoch's validation loss and score, float64 [R].

    What is not finite is part of the histories, but is neither the first nor the best of a row.
    """
    known = torch.isfinite(loss) & torch.isfinite(score)
    first_loss = torch.where(state.first_loss.isnan() & known, loss, state.first_loss)
    best_loss = torch.where(known, torch.minimum(state.best_loss, loss), state.best_loss)
    # Where the score is a negative loss, half a point means half a percent of the best loss.
    margin = torch.where(
        score < 0, state.best_score.abs() * config.plateau_points / 100, config.plateau_points
    )
    stuck = ((score - state.best_score) < margin) | ~known
    progress = torch.maximum(first_loss - best_loss, LEAST_PROGRESS * first_loss.abs())
    # The mean gain of the last epochs; NaN, which compares false, until there are enough.
    gain = (state.loss_history[:, -_SPAN] - loss) / _SPAN / progress
    stable = (gain > -config.stable_loss) & (gain < config.stable_gain)
    run = torch.where(stable, state.stable_run + 1, torch.zeros_like(state.stable_run))
    return TrackerState(
        epoch=state.epoch + 1,
        loss_history=torch.cat([state.loss_history[:, 1:], loss[:, None]], 1),
        score_history=torch.cat([state.score_history[:, 1:], score[:, None]], 1),
        first_loss=first_loss,
        best_loss=best_loss,
        best_score=torch.where(known, torch.maximum(state.best_score, score), state.best_score),
        plateau_epochs=torch.where(
            stuck, state.plateau_epochs + 1, torch.zeros_like(state.plateau_epochs)
        ),
        stable_run=run,
        stabilized=state.stabilized | (run >= config.stable_epochs),
    )


def read_signals(
    table: SlotTable,
    tracker: TrackerState,
    facts: RowFacts,
    *,
    train_loss: Tensor,
    spent: Tensor,
    rates: Rates,
    last_op: Tensor,
    last_success: Tensor,
    rolled_back: Tensor,
    twin_score: Tensor,
) -> Signals:
    """Return the signals of every row; empty slots hold the absent value of each field."""
    state, costs = table.state, table.costs
    occupied = state.occupied
    measured = torch.isfinite(state.contribution)
    in_slots = table.flops()
    rate_factor, learning_rate = rates(tracker.epoch + 1)
    seed_params, seed_flops = germination_costs(state, costs.seeds)

    def or_absent(value: Tensor) -> Tensor:
        """-1 where the slot is empty."""
        return torch.where(occupied, value, -1)

    def or_zero(value: Tensor) -> Tensor:
        """0 where the slot is empty."""
        return torch.where(occupied, value.to(torch.float32), 0.0)

    def or_nan(value: Tensor) -> Tensor:
        """NaN where no ablation has been measured."""
        return torch.where(measured, value.to(torch.float32), torch.nan)

    return Signals(
        epoch=tracker.epoch,
        max_epochs=facts.horizon,
        val_loss=tracker.loss_history[:, -1].to(torch.float32),
        val_score=tracker.score_history[:, -1].to(torch.float32),
        best_loss=tracker.best_loss.to(torch.float32),
        best_score=tracker.best_score.to(torch.float32),
        train_loss=train_loss.to(torch.float32),
        loss_history=tracker.loss_history.to(torch.float32),
        score_history=tracker.score_history.to(torch.float32),
        plateau_epochs=tracker.plateau_epochs,
        stabilized=tracker.stabilized,
        params=costs.host_params + state.params.sum(1),
        host_params=costs.host_params,
        budget=facts.budget,
        flops=costs.host_flops + in_slots.sum(1),
        host_flops=costs.host_flops,
        param_limit=costs.param_limit,
        flop_limit=costs.flop_limit,
        rate_factor=rate_factor.to(torch.float32),
        learning_rate=learning_rate.to(torch.float32),
        train_samples=facts.train_samples,
        samples_per_epoch=facts.samples_per_epoch,
        num_classes=facts.num_classes,
        chance_loss=facts.chance_loss.to(torch.float32),
        compute_budget=facts.compute,
        compute_spent=spent,
        last_op=last_op,
        last_success=last_success,
        rolled_back=rolled_back,
        enabled=table.enabled,
        occupied=occupied,
        alpha_velocity=or_zero(velocity(state)),
        time_to_target=or_zero(time_to_target(state)),
        **{name: or_absent(getattr(state, name)) for name in _OR_ABSENT},
        **{name: or_zero(getattr(state, name)) for name in _OR_ZERO},
        **{name: or_nan(getattr(state, name)) for name in _OR_NAN},
        vanishing=state.vanishing & occupied,
        exploding=state.exploding & occupied,
        interaction=state.interaction.to(torch.float32),
        slot_params=state.params,
        slot_flops=in_slots,
        slot_channels=costs.seeds.slot_channels,
        slot_positions=costs.seeds.slot_positions,
        slot_topology=costs.seeds.slot_topology,
        copies=standing_copies(state),
        seed_params=seed_params,
        seed_flops=seed_flops,
        twin_score=twin_score.to(torch.float32),
    )


# ---- The governor: notices when a row's training has gone wrong, before it can spoil a snapshot
#
# There are three panics: a loss that is not finite; a loss that falls back to chance after it was
# well below it; a loss that explodes three epochs in a row. Whoever owns the weights restores them.


WINDOW = 20  # Losses that are remembered.
MIN_SAMPLES = 10  # Losses needed before anything but NaN is judged.
SIGMAS = 6.0  # Standard deviations above the mean of a divergence.
FACTOR = 3.0  # Times the mean of a divergence.
LEARNED_SHARE = 0.6  # Share of the chance loss below which a host has learned.
CHANCE_SHARE = 0.065  # Distance to the chance loss, as a share of it, that counts as chance.


@dataclass(frozen=True, kw_only=True)
class GovernorConfig(Config):
    """When the governor panics, and how often it takes a snapshot."""

    is_on: bool = option(True, "Whether rows are watched at all.")
    snapshot_every: int = option(5, "Epochs between snapshots.", minimum=1)
    max_loss: float = option(
        12.0, "A loss below this is never a divergence (15 for text).", above=0.0
    )
    patience: int = option(3, "Diverged epochs in a row that are a panic.", minimum=1)


class Panic(CodeWithText):
    """Why a row is rolled back."""

    NONE = 0, "nothing is wrong"
    NOT_FINITE = 1, "the validation loss was not finite"
    LOBOTOMY = 2, "the network fell back to the loss of guessing"
    DIVERGENCE = 3, "the validation loss exploded"


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorState(TensorRecord):
    """Recent losses and anomalies of every row."""

    losses: Tensor
    """float64 [R, window], newest last, NaN where not yet there."""
    anomalies: Tensor
    """int64 [R], diverged epochs in a row."""


def start_governing(rows: int, device: torch.device | str = "cpu") -> GovernorState:
    """Return the state before the first epoch."""
    unknown = torch.full((rows, WINDOW), math.nan, dtype=torch.float64, device=device)
    return GovernorState(
        losses=unknown, anomalies=torch.zeros(rows, dtype=torch.int64, device=device)
    )


def govern(
    state: GovernorState, loss: Tensor, chance_loss: Tensor | float, config: GovernorConfig
) -> tuple[GovernorState, Tensor]:
    """Record one epoch's validation loss [R]; return the state and int64 [R], a `Panic`.

    `chance_loss` (one number or [R]) is that of a network that only guesses; NaN, where it is
    unknown, compares false.
    """
    known = torch.isfinite(state.losses)
    count = known.sum(1)
    filled = torch.where(known, state.losses, torch.zeros_like(state.losses))
    mean = filled.sum(1) / count.clamp(min=1)
    spread = torch.where(known, (state.losses - mean[:, None]).square(), torch.zeros_like(filled))
    sigma = (spread.sum(1) / count.clamp(min=1)).sqrt()
    judged = count >= MIN_SAMPLES
    finite = torch.isfinite(loss)

    had_learned = mean < LEARNED_SHARE * chance_loss
    at_chance = (loss - chance_loss).abs() < CHANCE_SHARE * chance_loss
    lobotomy = judged & had_learned & at_chance & finite
    anomaly = (
        judged
        & finite
        & (loss > config.max_loss)
        & (loss > mean + SIGMAS * sigma)
        & (loss > FACTOR * mean)
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
