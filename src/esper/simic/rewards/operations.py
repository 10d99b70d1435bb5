"""What a deed pays or costs by itself: operations, indecision, the first germination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.rules import is_in
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.simic.rewards.attribution import seed_attributions
from esper.simic.rewards.contract import NO_SLOT, Changes, StepView

_UNBLENDED = (SeedStage.GERMINATED, SeedStage.TRAINING)


@dataclass(frozen=True, kw_only=True)
class OperationConfig(Config):
    """What an operation costs or earns by itself."""

    germinate: float = option(0.15, "Cost of GERMINATE.", minimum=0.0)
    set_alpha_target: float = option(0.005, "Cost of SET_ALPHA_TARGET.", minimum=0.0)
    advance: float = option(0.0, "Cost of ADVANCE.", minimum=0.0)
    fossilize: float = option(0.01, "Cost of FOSSILIZE.", minimum=0.0)
    fossilize_harm: float = option(0.5, "Cost of a fossil that made it worse.", minimum=0.0)
    fossilize_harm_slope: float = option(0.2, "More of it per point lost.", minimum=0.0)
    fossilize_harm_limit: float = option(1.0, "Most of what the points add.", minimum=0.0)
    fossilize_hostage: float = option(0.3, "More for a fossil that is ransomware.", minimum=0.0)
    fossilize_bonus: float = option(0.5, "Bonus of a fossil that contributes.", minimum=0.0)
    fossilize_slope: float = option(0.1, "More of it per point of contribution.", minimum=0.0)
    fossilize_contribution: float = option(1.0, "Points it must contribute for the bonus.")
    fossilize_epochs: int = option(5, "Epochs in HOLDING for the whole bonus.", minimum=1)
    fossilize_idle: float = option(0.2, "Cost of a fossil that contributes less.", minimum=0.0)
    prune: float = option(0.005, "Cost of PRUNE.", minimum=0.0)
    prune_unknown: float = option(0.1, "Cost of pruning a young unmeasured seed.", minimum=0.0)
    prune_unknown_age: int = option(5, "Age from which that costs nothing.", minimum=0)
    prune_harmful: float = option(0.15, "Bonus of pruning a harmful seed.", minimum=0.0)
    prune_harmful_contribution: float = option(-0.5, "Contribution below which it is harmful.")
    prune_harmful_age: int = option(3, "Age from which there is the bonus.", minimum=0)
    prune_harmful_young: float = option(0.1, "Cost of pruning it earlier.", minimum=0.0)
    prune_useless: float = option(0.1, "Bonus of pruning a slightly harmful seed.", minimum=0.0)
    prune_good: float = option(0.3, "Cost of pruning a seed that contributes.", minimum=0.0)
    prune_good_slope: float = option(0.05, "More of it per point of contribution.", minimum=0.0)
    prune_good_limit: float = option(0.9, "Most of the two together.", minimum=0.0)
    punish_refusals: bool = option(
        False, "Whether an illegal operation costs something instead of counting as WAIT."
    )
    refused_germinate: float = option(0.3, "Cost of GERMINATE on a seed.", minimum=0.0)
    refused_fossilize: float = option(1.0, "Cost of FOSSILIZE on what does not hold.", minimum=0.0)
    refused_prune: float = option(0.2, "Cost of PRUNE on an empty slot.", minimum=0.0)
    refused_prune_fossil: float = option(1.0, "Cost of PRUNE on a fossil.", minimum=0.0)
    refused_prune_young: float = option(
        0.3, "Cost of PRUNE per epoch a seed is too young for it.", minimum=0.0
    )
    min_prune_age: int = option(1, "Age at which it is old enough, as in the rules.", minimum=0)


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


@dataclass(frozen=True, kw_only=True)
class WarningConfig(Config):
    """Small costs of leaving things as they are."""

    blending_base: float = option(0.1, "Cost of blending while worse than before.", minimum=0.0)
    blending_slope: float = option(0.05, "More of it per epoch in BLENDING.", minimum=0.0)
    blending_limit: float = option(0.3, "Most of what the epochs add.", minimum=0.0)
    holding_base: float = option(0.1, "Cost of holding a good seed undecided.", minimum=0.0)
    holding_slope: float = option(0.05, "More of it per epoch beyond the free ones.", minimum=0.0)
    holding_limit: float = option(0.3, "Largest cost of holding.", minimum=0.0)
    holding_free: int = option(2, "Epochs in HOLDING before it costs.", minimum=0)
    holding_ops: Literal["undecided", "wait"] = option(
        "undecided", "Warn at every op that leaves the seed undecided, or at WAIT only."
    )


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


@dataclass(frozen=True, kw_only=True)
class FirstGerminationConfig(Config):
    """Bonus for the first germination of an episode."""

    bonus: float = option(0.2, "Paid once per episode.", minimum=0.0)
    is_returned: bool = option(
        True, "Whether it is taken back when that seed is removed or never blended."
    )


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
