"""What growing costs: size, sudden changes, operations, indecision, rollbacks, failed starts."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import BLENDED_STAGES, LIVE_STAGES, SeedStage
from esper.simic.rewards.config import RentConfig
from esper.simic.rewards.terms.attribution import seed_attributions
from esper.simic.rewards.view import NO_SLOT, Changes, StepView


def effective_params(signals: Signals, config: RentConfig) -> Tensor:
    """Return float32 [R]: parameters of blended seeds by amplitude, with each slot's overhead."""
    blended = is_in(signals.stage, BLENDED_STAGES)
    overhead = config.slot_share * signals.host_params.float()[:, None]
    used = overhead + signals.alpha * signals.slot_params.float()
    return torch.where(blended, used, 0.0).sum(1)


def effective_flops(signals: Signals) -> Tensor:
    """Return float32 [R]: operations per sample of blended seeds by amplitude."""
    blended = is_in(signals.stage, BLENDED_STAGES)
    return torch.where(blended, signals.alpha * signals.slot_flops.float(), 0.0).sum(1)


def rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth in use in the epoch of the step."""
    config, after = view.config.rent, view.after
    host = after.host_params.float().clamp(min=max(config.min_host, 1.0))
    growth = effective_params(after, config) / host
    flop_growth = effective_flops(after) / after.host_flops.float().clamp(min=1)
    owed = config.weight * torch.log1p(growth) + config.flop_weight * torch.log1p(flop_growth)
    return -owed.clamp(max=config.limit)


def twin_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: added parameters and operations per sample.

    Doubling either costs a number of points over a whole episode.
    """
    config, after = view.config.twin, view.after
    steps = (after.max_epochs - 1).clamp(min=1)
    added = (after.params - after.host_params) / after.host_params.clamp(min=1)
    added_flops = (after.flops - after.host_flops) / after.host_flops.clamp(min=1)
    by_params = -config.rent_points / config.scale * added / steps
    return by_params - config.flop_rent_points / config.scale * added_flops / steps


def budget_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: parameters in use as a share of the budget (`basic`)."""
    used = effective_params(view.after, view.config.rent)
    return -view.config.basic.param_weight * used / view.after.budget.clamp(min=1)


def occupancy(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that are there, beyond the free ones; cooling slots are free."""
    config = view.config.occupancy
    seeds = view.has_module.sum(1)
    fossils = (view.after.stage == int(SeedStage.FOSSILIZED)).sum(1)
    return -config.per_seed * (seeds - config.free_seeds).clamp(min=0) - config.per_fossil * fossils


def growth_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth by seeds past their grace (`loss`)."""
    config, after = view.config.loss, view.after
    pays = view.has_module & (after.age > config.rent_free)
    growth = torch.where(pays, after.slot_params, 0).sum(1) / after.host_params.clamp(min=1)
    flop_growth = torch.where(pays, after.slot_flops, 0).sum(1) / after.host_flops.clamp(min=1)
    owed = config.rent_weight * torch.log1p(growth)
    owed = owed + config.flop_rent_weight * torch.log1p(flop_growth)
    return -owed.clamp(max=config.rent_limit)


def shock(view: StepView) -> Tensor:
    """Return [R], 0 or less: squared changes of alpha, weighted by the size of the seed."""
    config = view.config.shock
    change = view.after.alpha - view.before.alpha
    host = view.before.host_params.float().clamp(min=max(config.min_host, 1.0))
    size = view.before.slot_params.float() / host[:, None]
    cost = config.weight * (change.square() * size).sum(1)
    return -(cost if config.limit is None else cost.clamp(max=config.limit))


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


def blending(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that blend while the network is worse than at their start."""
    config = view.config.warning
    epochs = view.before.epochs_in_stage.float()
    cost = config.blending_base + (config.blending_slope * epochs).clamp(max=config.blending_limit)
    warned = (view.before.stage == int(SeedStage.BLENDING)) & (view.improvement < 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


def holding(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds worth keeping that are held without a decision."""
    config = view.config.warning
    epochs = view.before.epochs_in_stage
    beyond = (epochs - config.holding_free).clamp(min=0).float()
    cost = (config.holding_base + config.holding_slope * beyond).clamp(max=config.holding_limit)
    if config.holding_ops == "wait":
        undecided = (view.op == int(LifecycleOp.WAIT))[:, None]
    else:
        undecided = ~(view.did(LifecycleOp.FOSSILIZE) | view.did(LifecycleOp.PRUNE))
    warned = (view.before.stage == int(SeedStage.HOLDING)) & (epochs >= config.holding_free)
    warned = warned & undecided & (view.once(seed_attributions) > 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


def rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the penalty, in the step that was rolled back."""
    return torch.where(view.rolled_back, -view.config.governor.rollback_penalty, 0.0)


def twin_rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the same for `twin`, beside the gain that is lost."""
    return torch.where(view.rolled_back, -view.config.twin.rollback_penalty, 0.0)


def auto_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds the governor removed."""
    removed = (view.had_module & ~view.has_module).sum(1)
    return torch.where(view.rolled_back, -view.config.governor.auto_prune * removed, 0.0)


_UNBLENDED = (SeedStage.GERMINATED, SeedStage.TRAINING)


def first_germination(view: StepView) -> Tensor:
    """Return [R]: the bonus, in the step of the first germination."""
    return torch.where(view.once(_is_first), view.config.first_germination.bonus, 0.0)


def clawback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the bonus given back, in the step in which its seed fails."""
    config = view.config.first_germination
    if not config.is_returned:
        return torch.zeros_like(view.memory.gain)
    fresh = view.once(_is_first)
    # A rolled-back step never paid the bonus it would have to return.
    fails = view.once(_failing) & ~(fresh & view.rolled_back)[:, None]
    steps = torch.where(fresh[:, None], 0, view.before.age)
    owed = config.bonus / view.config.gamma**steps
    return -torch.where(fails, owed, 0.0).sum(1)


def follow_first_germination(view: StepView) -> Changes:
    """Remember the slot whose bonus may have to be returned."""
    held = view.once(_failing).any(1) | view.ended
    fresh = torch.where(
        view.once(_is_first), view.transition.actions["slot"], view.memory.first_slot
    )
    return {"first_slot": torch.where(held, NO_SLOT, fresh)}


def _is_first(view: StepView) -> Tensor:
    """Return bool [R]: this step germinated the first seed of the episode."""
    return (view.op == int(LifecycleOp.GERMINATE)) & (view.memory.germinated == 0)


def _failing(view: StepView) -> Tensor:
    """Return bool [R, S]: the first seed is gone after this step, or the end came too soon."""
    slots = torch.arange(view.after.num_slots, device=view.op.device)
    its_slot = (view.memory.first_slot[:, None] == slots) | (
        view.once(_is_first)[:, None] & view.at_slot
    )
    unripe = view.ended[:, None] & is_in(view.after.stage, _UNBLENDED)
    return its_slot & (~view.has_module | unripe)
