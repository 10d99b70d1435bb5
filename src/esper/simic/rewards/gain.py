"""What is earned: gains over the twin, potentials that move them in time, and what the end pays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.simic.rewards.contract import Changes, StepView, follow_seeds

BASIC_SCORE_WEIGHT = 5.0  # `basic`: reward for 100 points of progress.
LOSS_WEIGHT = 5.0  # `loss`: reward per typical change of the loss.
LOSS_LIMIT = 5.0  # `loss`: most typical changes that count.
LOSS_REGRESS_SHARE = 0.5  # `loss`: share of a rise of the loss that counts.
SCORE_WEIGHT = 0.05  # Reward per point of the final score.
FOSSIL_BONUS = 3.0  # Bonus for contributing fossils: this times tanh(their number / saturation).
FOSSIL_SATURATION = 3.0
SIMPLIFIED_SCORE_WEIGHT = 3.0  # `simplified`: reward for a final score of 100 points.
SIMPLIFIED_FOSSIL_BONUS = 2.0  # `simplified`: bonus per contributing fossil.
SPARSE_PARAM_WEIGHT = 0.1  # `sparse`, `minimal`: cost of fossils that use the whole budget.
SPARSE_LIMIT = 1.0  # `sparse`, `minimal`: bound of the final reward before its factor.


def gain_points(view: StepView) -> Tensor:
    """Return [R]: score minus the twin's, exactly 0 while the row is its twin.

    A seed that has not been blended in changes nothing about the network but its size, so a row is
    its twin until then, whatever was done to it. Measured, the two may differ all the same: on a
    device, stacks of other sizes add up in another order.
    """
    has_parted = view.once(follow_seeds)["has_parted"]
    twin = view.transition.twin_after
    missing = twin.isnan() & has_parted & view.transition.active & ~view.rolled_back
    if bool(missing.any()):
        rows = missing.nonzero().flatten().tolist()
        raise UsageError(
            f"the reward is a gain over the waiting twin, which has no score in rows {rows}; "
            "run twins, or use another reward"
        )
    return torch.where(has_parted, view.after.val_score - twin, 0.0)


def counted_gain(view: StepView) -> Tensor:
    """Return [R]: the gain that counts; at the end the mean over the last epochs."""
    recent = view.once(_recent_gains)
    return torch.where(view.transition.is_last, recent.nanmean(1), view.once(gain_points))


def gain(view: StepView) -> Tensor:
    """Return [R]: change of the gain over the twin; a rollback loses all of it."""
    now = torch.where(view.rolled_back, 0.0, view.once(counted_gain))
    return view.config.gamma * now - view.memory.gain


def gain_potential(view: StepView) -> Tensor:
    """Return [R]: what `gain` pays the change of, as it stands after the step."""
    return torch.where(view.rolled_back, 0.0, view.once(counted_gain))


def follow_gain(view: StepView) -> Changes:
    """Remember the gain that was paid for, and those of the last epochs."""
    return {"gain": view.once(counted_gain), "recent_gains": view.once(_recent_gains)}


def describe_gain(view: StepView) -> Mapping[str, Tensor]:
    """Return the gain in points after the step."""
    return {"gain_points": view.once(counted_gain)}


def score_change(view: StepView) -> Tensor:
    """Return [R]: change of the score in the step (`basic`)."""
    change = view.after.val_score - view.before.val_score
    return BASIC_SCORE_WEIGHT * change / 100


def loss_change(view: StepView) -> Tensor:
    """Return [R]: fall of the loss in typical changes; a rise counts less (`loss`)."""
    fall = (view.before.val_loss - view.after.val_loss) / view.config.loss.typical_change
    fall = fall.clamp(-LOSS_LIMIT, LOSS_LIMIT)
    return LOSS_WEIGHT * torch.where(fall < 0, LOSS_REGRESS_SHARE * fall, fall)


def _recent_gains(view: StepView) -> Tensor:
    newest = view.once(gain_points)[:, None]
    return torch.cat((view.memory.recent_gains[:, 1:], newest), dim=1)


def terminal(view: StepView) -> Tensor:
    """Return [R]: the final score and the fossils that contribute."""
    counted = torch.tanh(view.once(contributing_fossils) / FOSSIL_SATURATION)
    return _at_the_end(view, SCORE_WEIGHT * view.after.val_score + FOSSIL_BONUS * counted)


def open_seeds(view: StepView) -> Tensor:
    """Return [R]: what seeds cost that nobody has decided on by the end (`twin`).

    A seed helps as much while it holds as when it is fossilized; without this, nothing would tell
    a controller to finish what it has begun.
    """
    count = is_in(view.after.stage, LIVE_STAGES).sum(1)
    return _at_the_end(view, -view.config.twin.open_seed_cost * count.float())


def simplified_terminal(view: StepView) -> Tensor:
    """Return [R]: the final score and the number of contributing fossils (`simplified`)."""
    fossils = SIMPLIFIED_FOSSIL_BONUS * view.once(contributing_fossils)
    return _at_the_end(view, SIMPLIFIED_SCORE_WEIGHT * view.after.val_score / 100 + fossils)


def committed_terminal(view: StepView) -> Tensor:
    """Return [R]: the score of what stays, less the size of the fossils (`sparse`)."""
    fossil = view.after.stage == int(SeedStage.FOSSILIZED)
    size = torch.where(fossil, view.after.slot_params, 0).sum(1) / view.after.budget.clamp(min=1)
    value = committed_score(view.after) / 100 - SPARSE_PARAM_WEIGHT * size
    paid = view.config.sparse.scale * value.clamp(-SPARSE_LIMIT, SPARSE_LIMIT)
    return _at_the_end(view, paid)


def loss_terminal(view: StepView) -> Tensor:
    """Return [R]: the share of the way from chance to the target loss (`loss`)."""
    config = view.config.loss
    share = (config.baseline - view.after.val_loss) / (config.baseline - config.target)
    return _at_the_end(view, share.clamp(0, 1))


def contributing_fossils(view: StepView) -> Tensor:
    """Return float32 [R]: fossils that improved the network and do it no harm."""
    return view.once(follow_seeds)["fossil_contributes"].sum(1).float()


def committed_score(signals: Signals) -> Tensor:
    """Return float32 [R]: the score with every seed that is not fossilized switched off.

    Made of the ablations in the signals: score - sum of contributions + sum of interactions. That
    is exact for up to two such seeds; beyond, effects that only three together have are left out.
    """
    live = is_in(signals.stage, LIVE_STAGES)
    worth = torch.where(live, signals.contribution.nan_to_num(0.0), 0.0).sum(1)
    pairs = live[:, :, None] & live[:, None, :]
    # Each pair is there twice.
    shared = torch.where(pairs, signals.interaction, 0.0).sum((1, 2)) / 2
    return signals.val_score - worth + shared


def _at_the_end(view: StepView, value: Tensor) -> Tensor:
    return torch.where(view.transition.is_last, value, 0.0)


STAGE_POTENTIALS = {
    SeedStage.GERMINATED: 1.0,
    SeedStage.TRAINING: 2.0,
    SeedStage.BLENDING: 3.5,
    SeedStage.HOLDING: 5.5,
    SeedStage.FOSSILIZED: 6.0,
}
"""Potential of a seed by its stage."""
PROGRESS_RATE = 0.3  # Potential per epoch in the stage.
PROGRESS_LIMIT = 2.0  # Most that epochs in the stage add.
POTENTIAL_SCALE = 0.3  # Reward per unit of potential.
LOSS_POTENTIAL_SCALE = 0.1  # `loss`: reward per unit of potential.


def potential(signals: Signals, progress_rate: float = PROGRESS_RATE) -> Tensor:
    """Return [R]: stages and epochs in them, summed over the slots that hold a seed."""
    epochs = signals.epochs_in_stage.float()
    progress = (progress_rate * epochs).clamp(max=PROGRESS_LIMIT)
    total = torch.zeros_like(progress)
    for stage, level in STAGE_POTENTIALS.items():
        total = torch.where(signals.stage == int(stage), level + progress, total)
    return total.sum(1)


def shape(view: StepView, scale: float, progress_rate: float) -> Tensor:
    """Return [R]: scale * (gamma * potential after - potential before), 0 potential at the end."""
    later = torch.where(view.ended, 0.0, potential(view.after, progress_rate))
    return scale * (view.config.gamma * later - potential(view.before, progress_rate))


def pbrs(view: StepView) -> Tensor:
    """Return [R]: shaping by the potentials of stages and of epochs in them."""
    return shape(view, POTENTIAL_SCALE, PROGRESS_RATE)


def loss_pbrs(view: StepView) -> Tensor:
    """Return [R]: shaping by stages alone, on the scale of `loss`."""
    return shape(view, LOSS_POTENTIAL_SCALE, 0.0)
