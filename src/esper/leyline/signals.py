"""What a controller can see of every row: `Signals`, tensors over rows and slots.

Whoever trains hosts fills these in once per epoch; controllers, rewards and telemetry read them.
Absent values are written as the field says, never as a number that could be a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from esper.leyline.actions import TensorRecord

HISTORY = 5
"""Number of past epochs in the histories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals(TensorRecord):
    """One decision's worth of measurements for R rows with S slots each."""

    epoch: Tensor
    """int64 [R], epochs done."""
    max_epochs: Tensor
    """int64 [R], the horizon."""
    val_loss: Tensor
    """float32 [R], validation loss with every seed as it is."""
    val_score: Tensor
    """float32 [R], points: accuracy 0 to 100, or the negative loss."""
    best_loss: Tensor
    """float32 [R], lowest validation loss so far."""
    best_score: Tensor
    """float32 [R], highest score so far."""
    train_loss: Tensor
    """float32 [R], mean training loss of the last epoch, NaN where unknown."""
    loss_history: Tensor
    """float32 [R, 5], newest last, NaN where not yet there."""
    score_history: Tensor
    """float32 [R, 5], newest last, NaN where not yet there."""
    plateau_epochs: Tensor
    """int64 [R], epochs since the score last rose half a point above its best."""
    stabilized: Tensor
    """bool [R], the host has settled once; never released."""
    params: Tensor
    """int64 [R], trainable parameters now."""
    host_params: Tensor
    """int64 [R], trainable parameters of the host alone."""
    budget: Tensor
    """int64 [R], parameter budget."""
    flops: Tensor
    """int64 [R], operations of one sample's forward pass now, with every seed and gate."""
    host_flops: Tensor
    """int64 [R], operations of one sample's forward pass through the host alone."""
    param_limit: Tensor
    """int64 [R], most parameters the whole network may have, -1 without a limit."""
    flop_limit: Tensor
    """int64 [R], most operations per sample the whole network may take, -1 without a limit."""
    rate_factor: Tensor
    """float32 [R], share of the peak learning rate that the next epoch trains with."""
    learning_rate: Tensor
    """float32 [R], learning rate that the next epoch trains with, NaN where unknown."""
    train_samples: Tensor
    """int64 [R], samples of the training set, 0 where unknown."""
    samples_per_epoch: Tensor
    """int64 [R], samples trained on in one epoch, 0 where unknown."""
    num_classes: Tensor
    """int64 [R], classes or distinct tokens, 0 where there are none or nobody knows."""
    chance_loss: Tensor
    """float32 [R], loss of a network that only guesses, NaN where unknown."""
    compute_budget: Tensor
    """int64 [R], training FLOPs that the episode may take, -1 where it has epochs alone."""
    compute_spent: Tensor
    """int64 [R], those spent so far, evaluation included; 0 without a budget."""
    last_op: Tensor
    """int64 [R], previous op, WAIT at the start."""
    last_success: Tensor
    """bool [R], whether the previous action took effect, True at the start."""
    rolled_back: Tensor
    """bool [R], the governor acted in this step."""
    enabled: Tensor
    """bool [R, S], slot in use for this row."""
    occupied: Tensor
    """bool [R, S], slot has a record."""
    stage: Tensor
    """int64 [R, S], a `SeedStage`, -1 where empty."""
    blueprint: Tensor
    """int64 [R, S], blueprint id, -1 where empty."""
    alpha_mode: Tensor
    """int64 [R, S], an `AlphaMode`, -1 where empty."""
    algorithm: Tensor
    """int64 [R, S], an `AlphaAlgorithm`, -1 where empty."""
    alpha: Tensor
    """float32 [R, S], amplitude, 0 where empty."""
    alpha_target: Tensor
    """float32 [R, S], amplitude aimed for, 0 where empty."""
    alpha_velocity: Tensor
    """float32 [R, S], (target - start) / ticks of the running ramp, 0 in HOLD."""
    time_to_target: Tensor
    """float32 [R, S], ticks left of the running ramp."""
    epochs_in_stage: Tensor
    """int64 [R, S], -1 where empty."""
    age: Tensor
    """int64 [R, S], epochs since germination, -1 where empty."""
    counterfactual_age: Tensor
    """int64 [R, S], epochs since the last ablation, -1 where empty or never measured."""
    contribution: Tensor
    """float32 [R, S], points lost without this seed, NaN where never measured."""
    contribution_se: Tensor
    """float32 [R, S], paired standard error of the contribution, NaN where never measured."""
    contribution_velocity: Tensor
    """float32 [R, S], smoothed change of the contribution, NaN where never measured."""
    grad_norm: Tensor
    """float32 [R, S], global L2 norm of the seed's gradient."""
    grad_health: Tensor
    """float32 [R, S], 1 is healthy."""
    grad_health_prev: Tensor
    """float32 [R, S], the health of the epoch before."""
    vanishing: Tensor
    """bool [R, S], some gradient tensor has vanished."""
    exploding: Tensor
    """bool [R, S], some gradient tensor explodes."""
    interaction: Tensor
    """float32 [R, S, S], points two seeds gain together beyond their sum; 0 on the diagonal."""
    slot_params: Tensor
    """int64 [R, S], parameters of the seed and its gate."""
    slot_flops: Tensor
    """int64 [R, S], operations per sample of the seed and its gate, 0 where empty."""
    slot_channels: Tensor
    """int64 [R, S], width of the activation at the slot, 0 where absent or unknown."""
    slot_positions: Tensor
    """int64 [R, S], pixels or tokens at the slot, 1 for vectors, 0 where absent or unknown."""
    slot_topology: Tensor
    """int64 [R, S], index into `TOPOLOGIES`, -1 where absent or unknown."""
    copies: Tensor
    """int64 [R, S], copies of the block in front of the slot that the seed consists of, else 0."""
    seed_params: Tensor
    """int64 [R, S, B], most parameters a seed of every blueprint can come to have, gate included.

    -1 where the blueprint is not for the slot. Where copies can be doubled, what that adds.
    """
    seed_flops: Tensor
    """int64 [R, S, B], most operations per sample such a seed can come to take, gate included.

    -1 where the blueprint is not for the slot. Where copies can be doubled, what that adds.
    """
    twin_score: Tensor
    """float32 [R], the waiting twin's score, NaN where none runs; never an input of the actor."""

    @property
    def has_effective_seed(self) -> Tensor:
        """Bool [R], some seed takes part in the row's outputs; before, the row is its twin."""
        return (self.alpha > 0).any(1)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stage.shape[0]

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.stage.shape[1]
