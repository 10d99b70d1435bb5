"""What a deed pays or costs by itself: operations, indecision, the first germination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.rules import is_in
from esper.leyline.stages import SeedStage
from esper.simic.rewards.attribution import holds_hostage, seed_attributions
from esper.simic.rewards.contract import NO_SLOT, Changes, StepView

_UNBLENDED = (SeedStage.GERMINATED, SeedStage.TRAINING)

SET_ALPHA_TARGET = 0.005  # Cost of SET_ALPHA_TARGET.
FOSSILIZE = 0.01  # Cost of FOSSILIZE.
FOSSILIZE_HARM = 0.5  # Cost of a fossil that made it worse.
FOSSILIZE_HARM_SLOPE = 0.2  # More of it per point lost.
FOSSILIZE_HARM_LIMIT = 1.0  # Most of what the points add.
FOSSILIZE_HOSTAGE = 0.3  # More for a fossil that is ransomware.
FOSSILIZE_BONUS = 0.5  # Bonus of a fossil that contributes.
FOSSILIZE_SLOPE = 0.1  # More of it per point of contribution.
FOSSILIZE_CONTRIBUTION = 1.0  # Points it must contribute for the bonus.
FOSSILIZE_EPOCHS = 5  # Epochs in HOLDING for the whole bonus.
FOSSILIZE_IDLE = 0.2  # Cost of a fossil that contributes less.
PRUNE = 0.005  # Cost of PRUNE.
PRUNE_UNKNOWN = 0.1  # Cost of pruning a young unmeasured seed.
PRUNE_UNKNOWN_AGE = 5  # Age from which that costs nothing.
PRUNE_HARMFUL_CONTRIBUTION = -0.5  # Contribution below which a seed is harmful.
PRUNE_HARMFUL_YOUNG = 0.1  # Cost of pruning a harmful seed before there is a bonus for it.
PRUNE_USELESS = 0.1  # Bonus of pruning a slightly harmful seed.
PRUNE_GOOD = 0.3  # Cost of pruning a seed that contributes.
PRUNE_GOOD_SLOPE = 0.05  # More of it per point of contribution.
PRUNE_GOOD_LIMIT = 0.9  # Most of the two together.
EARLY_PRUNE = 0.1  # `minimal`: cost of pruning a seed that is too young.
EARLY_AGE = 5  # `minimal`: age from which it costs nothing.
ACTION_COST = 0.01  # `simplified`: cost of any op but WAIT.


@dataclass(frozen=True, kw_only=True)
class OperationConfig(Config):
    """What an operation costs or earns by itself."""

    germinate: float = option(0.15, "Cost of GERMINATE.", minimum=0.0)
    prune_harmful: float = option(0.15, "Bonus of pruning a harmful seed.", minimum=0.0)
    prune_harmful_age: int = option(3, "Age from which there is the bonus.", minimum=0)


def action(view: StepView) -> Tensor:
    """Return [R]: cost or bonus of the op that took effect; ADVANCE and WAIT have neither."""
    costs = {
        LifecycleOp.GERMINATE: view.config.operation.germinate,
        LifecycleOp.SET_ALPHA_TARGET: SET_ALPHA_TARGET,
        LifecycleOp.PRUNE: PRUNE,
        LifecycleOp.FOSSILIZE: FOSSILIZE,
    }
    total = torch.zeros_like(view.contribution)
    for op, cost in costs.items():
        total = torch.where(view.did(op), -cost, total)
    total = total + torch.where(view.did(LifecycleOp.FOSSILIZE), _fossilize(view), 0.0)
    total = total + torch.where(view.did(LifecycleOp.PRUNE), _prune(view), 0.0)
    return total.sum(1)


def early_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: pruning a seed that is too young to be judged (`minimal`)."""
    young = view.did(LifecycleOp.PRUNE) & (view.before.age < EARLY_AGE)
    return torch.where(young.any(1), -EARLY_PRUNE, 0.0)


def any_action(view: StepView) -> Tensor:
    """Return [R], 0 or less: any op but WAIT (`simplified`)."""
    acted = view.op != int(LifecycleOp.WAIT)
    return torch.where(acted, -ACTION_COST, 0.0)


def _fossilize(view: StepView) -> Tensor:
    """Return [R, S]: a bonus for what contributes, a cost for harm, a smaller one for the rest."""
    worth, improvement = view.contribution, view.improvement
    lost = (-FOSSILIZE_HARM_SLOPE * improvement).clamp(max=FOSSILIZE_HARM_LIMIT)
    harm = FOSSILIZE_HARM + lost + FOSSILIZE_HOSTAGE * holds_hostage(view)
    settled = (view.before.epochs_in_stage.float() / FOSSILIZE_EPOCHS).clamp(max=1)
    bonus = (FOSSILIZE_BONUS + FOSSILIZE_SLOPE * worth) * settled
    value = torch.where(worth >= FOSSILIZE_CONTRIBUTION, bonus, -FOSSILIZE_IDLE)
    return torch.where(improvement < 0, -harm, value)


def _prune(view: StepView) -> Tensor:
    """Return [R, S]: a bonus for removing harm, a cost for removing what helps or is unknown."""
    config = view.config.operation
    worth, age = view.contribution, view.before.age
    unknown = torch.where(age < PRUNE_UNKNOWN_AGE, -PRUNE_UNKNOWN, 0.0)
    ripe = age >= config.prune_harmful_age
    harmful = torch.where(ripe, config.prune_harmful, -PRUNE_HARMFUL_YOUNG)
    cost = (PRUNE_GOOD + PRUNE_GOOD_SLOPE * worth).clamp(max=PRUNE_GOOD_LIMIT)
    value = torch.where(worth < 0, PRUNE_USELESS, -cost)
    value = torch.where(worth < PRUNE_HARMFUL_CONTRIBUTION, harmful, value)
    return torch.where(worth.isnan(), unknown, value)


BLENDING_BASE = 0.1  # Cost of blending while worse than before.
BLENDING_SLOPE = 0.05  # More of it per epoch in BLENDING.
BLENDING_LIMIT = 0.3  # Most of what the epochs add.
HOLDING_BASE = 0.1  # Cost of holding a good seed undecided.
HOLDING_SLOPE = 0.05  # More of it per epoch beyond the free ones.
HOLDING_LIMIT = 0.3  # Largest cost of holding.
HOLDING_FREE = 2  # Epochs in HOLDING before it costs.


@dataclass(frozen=True, kw_only=True)
class WarningConfig(Config):
    """Small costs of leaving things as they are."""

    holding_ops: Literal["undecided", "wait"] = option(
        "undecided", "Warn at every op that leaves the seed undecided, or at WAIT only."
    )


def blending(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that blend while the network is worse than at their start."""
    epochs = view.before.epochs_in_stage.float()
    cost = BLENDING_BASE + (BLENDING_SLOPE * epochs).clamp(max=BLENDING_LIMIT)
    warned = (view.before.stage == int(SeedStage.BLENDING)) & (view.improvement < 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


def holding(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds worth keeping that are held without a decision."""
    epochs = view.before.epochs_in_stage
    beyond = (epochs - HOLDING_FREE).clamp(min=0).float()
    cost = (HOLDING_BASE + HOLDING_SLOPE * beyond).clamp(max=HOLDING_LIMIT)
    if view.config.warning.holding_ops == "wait":
        undecided = (view.op == int(LifecycleOp.WAIT))[:, None]
    else:
        undecided = ~(view.did(LifecycleOp.FOSSILIZE) | view.did(LifecycleOp.PRUNE))
    warned = (view.before.stage == int(SeedStage.HOLDING)) & (epochs >= HOLDING_FREE)
    warned = warned & undecided & (view.once(seed_attributions) > 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


@dataclass(frozen=True, kw_only=True)
class FirstGerminationConfig(Config):
    """Bonus for the first germination of an episode."""

    bonus: float = option(
        0.2,
        "Paid once per episode; taken back when that seed is removed or never blended.",
        minimum=0.0,
    )


def first_germination(view: StepView) -> Tensor:
    """Return [R]: the bonus, in the step of the first germination."""
    return torch.where(view.once(_is_first), view.config.first_germination.bonus, 0.0)


def clawback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the bonus given back, in the step in which its seed fails."""
    fresh = view.once(_is_first)
    # A rolled-back step never paid the bonus it would have to return.
    fails = view.once(_failing) & ~(fresh & view.rolled_back)[:, None]
    steps = torch.where(fresh[:, None], 0, view.before.age)
    owed = view.config.first_germination.bonus / view.config.gamma**steps
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
