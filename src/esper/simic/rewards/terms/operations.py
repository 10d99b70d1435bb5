"""What an operation costs or earns by itself, judged by the seed it is about."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.simic.rewards.view import StepView


def action(view: StepView) -> Tensor:
    """Return [R]: cost or bonus of the op that took effect."""
    config = view.config.operation
    costs = {
        LifecycleOp.GERMINATE: config.germinate,
        LifecycleOp.SET_ALPHA_TARGET: config.set_alpha_target,
        LifecycleOp.PRUNE: config.prune,
        LifecycleOp.FOSSILIZE: config.fossilize,
        LifecycleOp.ADVANCE: config.advance,
    }
    total = torch.zeros_like(view.contribution)
    for op, cost in costs.items():
        total = torch.where(view.did(op), -cost, total)
    total = total + torch.where(view.did(LifecycleOp.FOSSILIZE), _fossilize(view), 0.0)
    total = total + torch.where(view.did(LifecycleOp.PRUNE), _prune(view), 0.0)
    if config.punish_refusals:
        total = total - _refused(view)
    return total.sum(1)


def early_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: pruning a seed that is too young to be judged (`minimal`)."""
    config = view.config.sparse
    young = view.did(LifecycleOp.PRUNE) & (view.before.age < config.early_age)
    return torch.where(young.any(1), -config.early_prune, 0.0)


def any_action(view: StepView) -> Tensor:
    """Return [R], 0 or less: any op but WAIT (`simplified`)."""
    acted = view.op != int(LifecycleOp.WAIT)
    return torch.where(acted, -view.config.simplified.action_cost, 0.0)


def _fossilize(view: StepView) -> Tensor:
    """Return [R, S]: a bonus for what contributes, a cost for harm, a smaller one for the rest."""
    config, ransomware = view.config.operation, view.config.ransomware
    worth, improvement = view.contribution, view.improvement
    lost = (-config.fossilize_harm_slope * improvement).clamp(max=config.fossilize_harm_limit)
    hostage = worth > ransomware.hostage_contribution
    hostage &= improvement < ransomware.hostage_improvement
    harm = config.fossilize_harm + lost + config.fossilize_hostage * hostage
    settled = (view.before.epochs_in_stage.float() / config.fossilize_epochs).clamp(max=1)
    bonus = (config.fossilize_bonus + config.fossilize_slope * worth) * settled
    value = torch.where(worth >= config.fossilize_contribution, bonus, -config.fossilize_idle)
    return torch.where(improvement < 0, -harm, value)


def _prune(view: StepView) -> Tensor:
    """Return [R, S]: a bonus for removing harm, a cost for removing what helps or is unknown."""
    config = view.config.operation
    worth, age = view.contribution, view.before.age
    young = age < config.prune_unknown_age
    unknown = torch.where(young, -config.prune_unknown, 0.0)
    ripe = age >= config.prune_harmful_age
    harmful = torch.where(ripe, config.prune_harmful, -config.prune_harmful_young)
    cost = (config.prune_good + config.prune_good_slope * worth).clamp(max=config.prune_good_limit)
    value = torch.where(worth < 0, config.prune_useless, -cost)
    value = torch.where(worth < config.prune_harmful_contribution, harmful, value)
    return torch.where(worth.isnan(), unknown, value)


def _refused(view: StepView) -> Tensor:
    """Return [R, S], 0 or more: what asking for the impossible costs."""
    config = view.config.operation
    stage, age = view.before.stage, view.before.age
    asked = view.at_slot & ~view.after.last_success[:, None]
    op = view.transition.op[:, None]
    germinate = (op == int(LifecycleOp.GERMINATE)) & view.had_module
    fossilize = (op == int(LifecycleOp.FOSSILIZE)) & (stage != int(SeedStage.HOLDING))
    prune = op == int(LifecycleOp.PRUNE)
    nothing = prune & ~view.had_module
    fossil = prune & (stage == int(SeedStage.FOSSILIZED))
    missing = (config.min_prune_age - age).clamp(min=0) * (prune & is_in(stage, LIVE_STAGES))
    cost = (
        config.refused_germinate * germinate
        + config.refused_fossilize * fossilize
        + config.refused_prune * nothing
        + config.refused_prune_fossil * fossil
        + config.refused_prune_young * missing
    )
    return torch.where(asked, cost, 0.0)
