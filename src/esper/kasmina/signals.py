"""From what Kasmina remembers to what a controller sees."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.kasmina.amplitude import time_to_target, velocity
from esper.kasmina.state import SlotState
from esper.kasmina.tracking import TrackerState
from esper.leyline.signals import Signals


def read_signals(
    state: SlotState,
    tracker: TrackerState,
    *,
    enabled: Tensor,
    max_epochs: Tensor,
    host_params: Tensor,
    budget: Tensor,
    last_op: Tensor,
    last_success: Tensor,
    rolled_back: Tensor,
    twin_score: Tensor,
) -> Signals:
    """Return the signals of every row; empty slots hold the absent value of each field."""
    occupied = state.occupied
    measured = torch.isfinite(state.contribution)

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
        max_epochs=max_epochs,
        val_loss=tracker.loss_history[:, -1].to(torch.float32),
        val_score=tracker.score_history[:, -1].to(torch.float32),
        best_loss=tracker.best_loss.to(torch.float32),
        best_score=tracker.best_score.to(torch.float32),
        loss_history=tracker.loss_history.to(torch.float32),
        score_history=tracker.score_history.to(torch.float32),
        plateau_epochs=tracker.plateau_epochs,
        stabilized=tracker.stabilized,
        params=host_params + state.params.sum(1),
        host_params=host_params,
        budget=budget,
        last_op=last_op,
        last_success=last_success,
        rolled_back=rolled_back,
        enabled=enabled,
        occupied=occupied,
        stage=or_absent(state.stage),
        blueprint=or_absent(state.blueprint),
        alpha_mode=or_absent(state.alpha_mode),
        algorithm=or_absent(state.algorithm),
        alpha=or_zero(state.alpha),
        alpha_target=or_zero(state.alpha_target),
        alpha_velocity=or_zero(velocity(state)),
        time_to_target=or_zero(time_to_target(state)),
        epochs_in_stage=or_absent(state.epochs_in_stage),
        age=or_absent(state.age),
        counterfactual_age=or_absent(state.counterfactual_age),
        contribution=or_nan(state.contribution),
        contribution_se=or_nan(state.contribution_se),
        contribution_velocity=or_nan(state.contribution_velocity),
        grad_norm=or_zero(state.grad_norm),
        grad_health=or_zero(state.grad_health),
        grad_health_prev=or_zero(state.grad_health_prev),
        vanishing=state.vanishing & occupied,
        exploding=state.exploding & occupied,
        interaction=state.interaction.to(torch.float32),
        slot_params=state.params,
        twin_score=twin_score.to(torch.float32),
    )
