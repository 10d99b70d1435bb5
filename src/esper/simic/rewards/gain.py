"""What is earned: gains over the twin, potentials that move them in time, and what the end pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.simic.rewards.contract import Changes, StepView, follow_seeds


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


@dataclass(frozen=True, kw_only=True)
class TerminalConfig(Config):
    """Bonus at the end of an episode."""

    score_weight: float = option(0.05, "Reward per point of the final score.")
    fossil_bonus: float = option(3.0, "Bonus for contributing fossils.", minimum=0.0)
    fossil_saturation: float | None = option(
        3.0, "The bonus is bonus * tanh(count / this); nothing makes it bonus * count.", above=0.0
    )
    min_improvement: float = option(1.0, "Improvement at fossilization of a contributing fossil.")


def terminal(view: StepView) -> Tensor:
    """Return [R]: the final score and the fossils that contribute."""
    config = view.config.terminal
    count = view.once(contributing_fossils)
    if config.fossil_saturation is None:
        fossils = config.fossil_bonus * count
    else:
        fossils = config.fossil_bonus * torch.tanh(count / config.fossil_saturation)
    return _at_the_end(view, config.score_weight * view.after.val_score + fossils)


def open_seeds(view: StepView) -> Tensor:
    """Return [R]: what seeds cost that nobody has decided on by the end (`twin`).

    A seed helps as much while it holds as when it is fossilized; without this, nothing would tell
    a controller to finish what it has begun.
    """
    count = is_in(view.after.stage, LIVE_STAGES).sum(1)
    return _at_the_end(view, -view.config.twin.open_seed_cost * count.float())


def simplified_terminal(view: StepView) -> Tensor:
    """Return [R]: the final score and the number of contributing fossils (`simplified`)."""
    config = view.config.simplified
    fossils = config.fossil_bonus * view.once(contributing_fossils)
    return _at_the_end(view, config.score_weight * view.after.val_score / 100 + fossils)


def committed_terminal(view: StepView) -> Tensor:
    """Return [R]: the score of what stays, less the size of the fossils (`sparse`)."""
    config = view.config.sparse
    fossil = view.after.stage == int(SeedStage.FOSSILIZED)
    size = torch.where(fossil, view.after.slot_params, 0).sum(1) / view.after.budget.clamp(min=1)
    value = committed_score(view.after) / 100 - config.param_weight * size
    return _at_the_end(view, config.scale * value.clamp(-config.limit, config.limit))


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


@dataclass(frozen=True, kw_only=True)
class PotentialConfig(Config):
    """Stage potentials; shaping pays scale * (gamma * potential after - potential before)."""

    scale: float = option(0.3, "Reward per unit of potential.", minimum=0.0)
    germinated: float = option(1.0, "Potential of GERMINATED.")
    training: float = option(2.0, "Potential of TRAINING.")
    blending: float = option(3.5, "Potential of BLENDING.")
    holding: float = option(5.5, "Potential of HOLDING.")
    fossilized: float = option(6.0, "Potential of FOSSILIZED.")
    progress_rate: float = option(0.3, "Potential per epoch in the stage.", minimum=0.0)
    progress_limit: float = option(2.0, "Most that epochs in the stage add.", minimum=0.0)


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
