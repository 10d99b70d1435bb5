"""The terms of rewards: gains, costs of growing, and costs of operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import BLENDED_STAGES, LIVE_STAGES, SeedStage
from esper.simic.rewards.attribution import holds_hostage, seed_attributions
from esper.simic.rewards.contract import NO_SLOT, Changes, StepView, follow_seeds

# ---- Gains: over the twin, of the score, by potentials, and at the end


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
    """Return [R]: score minus the twin's, exactly 0 until a seed is blended.

    Until then the row computes the same as its twin. Measured scores may still differ: on a GPU,
    stacks of different sizes sum in a different order.
    """
    has_parted = view.once(follow_seeds)["has_parted"]
    twin = view.transition.twin_after
    missing = twin.isnan() & has_parted & view.transition.active & ~view.rolled_back
    if bool(missing.any()):
        rows = missing.nonzero().flatten().tolist()
        raise UsageError(
            f"the reward is the gain over a twin, and rows {rows} have no twin score; "
            "train twins, or use another reward"
        )
    return torch.where(has_parted, view.after.val_score - twin, 0.0)


def counted_gain(view: StepView) -> Tensor:
    """Return [R]: the gain; at the end of an episode its mean over the last epochs."""
    recent = view.once(_recent_gains)
    return torch.where(view.transition.is_last, recent.nanmean(1), view.once(gain_points))


def gain(view: StepView) -> Tensor:
    """Return [R]: change of the gain over the twin; after a rollback the gain is 0."""
    now = torch.where(view.rolled_back, 0.0, view.once(counted_gain))
    return view.config.gamma * now - view.memory.gain


def gain_potential(view: StepView) -> Tensor:
    """Return [R]: the potential of `gain` after the step."""
    return torch.where(view.rolled_back, 0.0, view.once(counted_gain))


def follow_gain(view: StepView) -> Changes:
    """Remember the gain that was paid, and the gains of the last epochs."""
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
    """Return [R]: reward of the final score and of fossils that contribute."""
    counted = torch.tanh(view.once(contributing_fossils) / FOSSIL_SATURATION)
    return _at_the_end(view, SCORE_WEIGHT * view.after.val_score + FOSSIL_BONUS * counted)


def open_seeds(view: StepView) -> Tensor:
    """Return [R], 0 or less: cost of live seeds at the end (`twin`).

    A seed in HOLDING helps as much as a fossil; without this cost a controller would have no
    reason to fossilize it.
    """
    count = is_in(view.after.stage, LIVE_STAGES).sum(1)
    return _at_the_end(view, -view.config.twin.open_seed_cost * count.float())


def simplified_terminal(view: StepView) -> Tensor:
    """Return [R]: the final score and the number of contributing fossils (`simplified`)."""
    fossils = SIMPLIFIED_FOSSIL_BONUS * view.once(contributing_fossils)
    return _at_the_end(view, SIMPLIFIED_SCORE_WEIGHT * view.after.val_score / 100 + fossils)


def committed_terminal(view: StepView) -> Tensor:
    """Return [R]: the score with fossils only, minus their size (`sparse`)."""
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
    """Return float32 [R]: number of fossils that improved the network and do not harm it."""
    return view.once(follow_seeds)["fossil_contributes"].sum(1).float()


def committed_score(signals: Signals) -> Tensor:
    """Return float32 [R]: the score with every live seed switched off.

    Computed from the ablations in the signals: score - sum of contributions + sum of interactions.
    This is exact for up to two live seeds; effects of three or more together are left out.
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
    """Return [R]: the potential of stages and of epochs in them, summed over the seeds."""
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


# ---- Costs: size, slots, sudden changes, rollbacks


MIN_HOST = 200.0  # Host parameters that are assumed at least.
RENT_WEIGHT = 0.5  # Factor of the logarithm of the growth.
RENT_LIMIT = 1.5  # Largest rent of one step.
SLOT_SHARE = 0.0039  # Overhead of a blended slot, as a share of the host.
BASIC_PARAM_WEIGHT = 0.1  # `basic`: cost per step of the whole budget in use.
LOSS_RENT_FREE = 3  # `loss`: age up to which a seed pays no rent.
LOSS_RENT_LIMIT = 5.0  # `loss`: largest rent of one step.
FREE_SEEDS = 1  # Seeds that occupy a slot at no cost.
SEED_COST = 0.01  # Cost of each further live or fossilized seed.
FOSSIL_COST = 0.002  # Further cost of each fossil.
SHOCK_WEIGHT = 0.1958  # Factor of the squared change times the size.
SHOCK_LIMIT = 1.0  # Largest cost of one step.
ROLLBACK_PENALTY = 10.0  # Cost of a rollback, which ends the row, in every mode but `twin`.
TWIN_ROLLBACK_PENALTY = 1.0  # `twin`: cost of a rollback beside the gain that is lost.
AUTO_PRUNE = 0.2  # Cost per seed the governor removed.


def effective_params(signals: Signals) -> Tensor:
    """Return float32 [R]: parameters of blended seeds by amplitude, with each slot's overhead."""
    blended = is_in(signals.stage, BLENDED_STAGES)
    overhead = SLOT_SHARE * signals.host_params.float()[:, None]
    used = overhead + signals.alpha * signals.slot_params.float()
    return torch.where(blended, used, 0.0).sum(1)


def rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth in use in the epoch of the step."""
    host = view.after.host_params.float().clamp(min=MIN_HOST)
    owed = RENT_WEIGHT * torch.log1p(effective_params(view.after) / host)
    return -owed.clamp(max=RENT_LIMIT)


def twin_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: added parameters and operations per sample.

    Doubling either costs a number of points over a whole episode.
    """
    config, after = view.config.twin, view.after
    steps = (after.max_epochs - 1).clamp(min=1)
    added = (after.params - after.host_params) / after.host_params.clamp(min=1)
    added_flops = (after.flops - after.host_flops) / after.host_flops.clamp(min=1)
    by_params = -config.rent_points * added / steps
    return by_params - config.flop_rent_points * added_flops / steps


def budget_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: parameters in use as a share of the budget (`basic`)."""
    used = effective_params(view.after)
    return -BASIC_PARAM_WEIGHT * used / view.after.budget.clamp(min=1)


def growth_rent(view: StepView) -> Tensor:
    """Return [R], 0 or less: logarithm of the growth by seeds past their grace (`loss`)."""
    after = view.after
    pays = view.has_module & (after.age > LOSS_RENT_FREE)
    growth = torch.where(pays, after.slot_params, 0).sum(1) / after.host_params.clamp(min=1)
    owed = view.config.loss.rent_weight * torch.log1p(growth)
    return -owed.clamp(max=LOSS_RENT_LIMIT)


def occupancy(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds that are there, beyond the free ones; cooling slots are free."""
    seeds = view.has_module.sum(1)
    fossils = (view.after.stage == int(SeedStage.FOSSILIZED)).sum(1)
    return -SEED_COST * (seeds - FREE_SEEDS).clamp(min=0) - FOSSIL_COST * fossils


def shock(view: StepView) -> Tensor:
    """Return [R], 0 or less: squared changes of alpha, weighted by the size of the seed."""
    change = view.after.alpha - view.before.alpha
    host = view.before.host_params.float().clamp(min=MIN_HOST)
    size = view.before.slot_params.float() / host[:, None]
    return -(SHOCK_WEIGHT * (change.square() * size).sum(1)).clamp(max=SHOCK_LIMIT)


def rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the penalty, in the step that was rolled back."""
    return torch.where(view.rolled_back, -ROLLBACK_PENALTY, 0.0)


def twin_rollback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the same for `twin`, beside the gain that is lost."""
    return torch.where(view.rolled_back, -TWIN_ROLLBACK_PENALTY, 0.0)


def auto_prune(view: StepView) -> Tensor:
    """Return [R], 0 or less: seeds the governor removed."""
    removed = (view.had_module & ~view.has_module).sum(1)
    return torch.where(view.rolled_back, -AUTO_PRUNE * removed, 0.0)


# ---- Costs and bonuses of operations


_UNBLENDED = (SeedStage.GERMINATED, SeedStage.TRAINING)

GERMINATE = 0.15  # Cost of GERMINATE.
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
PRUNE_HARMFUL = 0.15  # Bonus of pruning a harmful seed.
PRUNE_HARMFUL_AGE = 3  # Age from which there is the bonus.
PRUNE_HARMFUL_YOUNG = 0.1  # Cost of pruning it earlier.
PRUNE_USELESS = 0.1  # Bonus of pruning a slightly harmful seed.
PRUNE_GOOD = 0.3  # Cost of pruning a seed that contributes.
PRUNE_GOOD_SLOPE = 0.05  # More of it per point of contribution.
PRUNE_GOOD_LIMIT = 0.9  # Most of the two together.
EARLY_PRUNE = 0.1  # `minimal`: cost of pruning a seed that is too young.
EARLY_AGE = 5  # `minimal`: age from which it costs nothing.
ACTION_COST = 0.01  # `simplified`: cost of any op but WAIT.


def action(view: StepView) -> Tensor:
    """Return [R]: cost or bonus of the op that took effect; ADVANCE and WAIT have neither."""
    costs = {
        LifecycleOp.GERMINATE: GERMINATE,
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
    worth, age = view.contribution, view.before.age
    unknown = torch.where(age < PRUNE_UNKNOWN_AGE, -PRUNE_UNKNOWN, 0.0)
    harmful = torch.where(age >= PRUNE_HARMFUL_AGE, PRUNE_HARMFUL, -PRUNE_HARMFUL_YOUNG)
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

# Paid once per episode; taken back when that seed is removed or never blended.
FIRST_GERMINATION = 0.2


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
    undecided = ~(view.did(LifecycleOp.FOSSILIZE) | view.did(LifecycleOp.PRUNE))
    warned = (view.before.stage == int(SeedStage.HOLDING)) & (epochs >= HOLDING_FREE)
    warned = warned & undecided & (view.once(seed_attributions) > 0)
    return -view.mean_over_live(torch.where(warned, cost, 0.0))


def first_germination(view: StepView) -> Tensor:
    """Return [R]: the bonus, in the step of the first germination."""
    return torch.where(view.once(_is_first), FIRST_GERMINATION, 0.0)


def clawback(view: StepView) -> Tensor:
    """Return [R], 0 or less: the bonus given back, in the step in which its seed fails."""
    fresh = view.once(_is_first)
    # A rolled-back step never paid the bonus it would have to return.
    fails = view.once(_failing) & ~(fresh & view.rolled_back)[:, None]
    steps = torch.where(fresh[:, None], 0, view.before.age)
    owed = FIRST_GERMINATION / view.config.gamma**steps
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
