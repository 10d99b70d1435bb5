"""What is paid in the last step of an episode that reaches its horizon."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.simic.rewards.memory import follow_seeds
from esper.simic.rewards.view import StepView


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
