"""Gains: over the waiting twin, of the score, of the loss.

The gain over the twin is a potential like any other: the step pays (gamma * gain now - gain before)
/ scale. The discounted sum over an episode is gamma^T * the final gain: a gain that is lost again
has paid nothing, and what the host learns by itself cancels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.simic.rewards.memory import Changes, follow_seeds
from esper.simic.rewards.view import StepView


def gain_points(view: StepView) -> Tensor:
    """Return [R]: score minus the twin's, exactly 0 while the row is its twin."""
    acted = view.once(follow_seeds)["acted"]
    twin = view.transition.twin_after
    missing = twin.isnan() & acted & view.transition.active & ~view.rolled_back
    if bool(missing.any()):
        rows = missing.nonzero().flatten().tolist()
        raise UsageError(
            f"the reward is a gain over the waiting twin, which has no score in rows {rows}; "
            "run twins, or use another reward"
        )
    return torch.where(acted, view.after.val_score - twin, 0.0)


def counted_gain(view: StepView) -> Tensor:
    """Return [R]: the gain that counts; at the end the mean over the last epochs."""
    recent = view.once(_recent_gains)
    return torch.where(view.transition.is_last, recent.nanmean(1), view.once(gain_points))


def gain(view: StepView) -> Tensor:
    """Return [R]: change of the gain over the twin; a rollback loses all of it."""
    now = torch.where(view.rolled_back, 0.0, view.once(counted_gain))
    return (view.config.gamma * now - view.memory.gain) / view.config.twin.scale


def gain_potential(view: StepView) -> Tensor:
    """Return [R]: what `gain` pays the change of, as it stands after the step."""
    return torch.where(view.rolled_back, 0.0, view.once(counted_gain)) / view.config.twin.scale


def follow_gain(view: StepView) -> Changes:
    """Remember the gain that was paid for, and those of the last epochs."""
    return {"gain": view.once(counted_gain), "recent_gains": view.once(_recent_gains)}


def describe_gain(view: StepView) -> Mapping[str, Tensor]:
    """Return the gain in points after the step."""
    return {"gain_points": view.once(counted_gain)}


def score_change(view: StepView) -> Tensor:
    """Return [R]: change of the score in the step (`basic`)."""
    change = view.after.val_score - view.before.val_score
    return view.config.basic.score_weight * change / 100


def loss_change(view: StepView) -> Tensor:
    """Return [R]: fall of the loss in typical changes; a rise counts less (`loss`)."""
    config = view.config.loss
    fall = (view.before.val_loss - view.after.val_loss) / config.typical_change
    fall = fall.clamp(-config.limit, config.limit)
    return config.weight * torch.where(fall < 0, config.regress_share * fall, fall)


def _recent_gains(view: StepView) -> Tensor:
    newest = view.once(gain_points)[:, None]
    return torch.cat((view.memory.recent_gains[:, 1:], newest), dim=1)
