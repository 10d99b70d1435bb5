"""Terms that pay for contributions of seeds: bounded attribution, escrow, synergy, hindsight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import AlphaMode, SeedStage
from esper.simic.rewards.contract import Changes, StepView, follow_seeds

Combination = Literal["harmonic", "geometric", "minimum"]

UNKNOWN_SHARE = 0.5  # Share of the contribution where the progress is unknown.
REGRESS_STEEPNESS = 3.0  # How fast the discount falls per point the network got worse.
PROXY_WEIGHT = 0.3  # Reward per point of progress of a seed that was never measured.
TIMING_EPOCHS = 10  # Germinated from this epoch on: no discount.
TIMING_LEAST = 0.4  # Discount of a seed that was germinated at epoch 0.

# A seed whose contribution exceeds what the network gained looks like ransomware.
RANSOMWARE_CONTRIBUTION = 1.0  # Contributions up to this are never suspected.
RANSOMWARE_DISCOUNT = 0.5  # Regress discount below which the discount alone punishes.
RANSOMWARE_IMPROVEMENT = 0.1  # Improvement above which the ratio decides.
RANSOMWARE_RATIO = 5.0  # Contribution over improvement that is still fine.
RANSOMWARE_RATIO_WEIGHT = 0.1  # Penalty per such ratio of excess.
RANSOMWARE_SCALE = 10.0  # Contribution without improvement that costs the whole limit.
RANSOMWARE_LIMIT = 0.3  # Largest penalty.
HOSTAGE_CONTRIBUTION = 0.1  # Contribution above which a seed may hold points hostage.
HOSTAGE_IMPROVEMENT = -0.2  # Improvement below which it does.


def regress_discount(view: StepView) -> Tensor:
    """Return [R, S]: 1 where the network is no worse than at the seed's start, less where it is."""
    fallen = torch.sigmoid(REGRESS_STEEPNESS * view.improvement)
    return torch.where(view.improvement >= 0, 1.0, fallen)


def ransomware_penalty(view: StepView) -> Tensor:
    """Return [R, S], 0 or less: the penalty of a contribution far beyond the network's gain."""
    worth, improvement = view.contribution, view.improvement
    if view.config.disable_anti_gaming:
        return torch.zeros_like(worth)
    excess = worth / improvement - RANSOMWARE_RATIO
    by_ratio = RANSOMWARE_RATIO_WEIGHT * excess.clamp(min=0) / RANSOMWARE_RATIO
    by_size = RANSOMWARE_LIMIT * (worth / RANSOMWARE_SCALE).clamp(max=1)
    grew = improvement > RANSOMWARE_IMPROVEMENT
    penalty = torch.where(grew, by_ratio.clamp(max=RANSOMWARE_LIMIT), by_size)
    suspect = worth > RANSOMWARE_CONTRIBUTION
    suspect &= view.once(regress_discount) >= RANSOMWARE_DISCOUNT
    return torch.where(suspect, -penalty, 0.0)


def holds_hostage(view: StepView) -> Tensor:
    """Return bool [R, S]: the seed contributes, but the network is worse than before it."""
    return (view.contribution > HOSTAGE_CONTRIBUTION) & (view.improvement < HOSTAGE_IMPROVEMENT)


def timing_discount(view: StepView) -> Tensor:
    """Return [R, S]: a discount of seeds germinated while the host still improved by itself."""
    if view.config.disable_timing_discount:
        return torch.ones_like(view.contribution)
    germinated = (view.before.epoch[:, None] - view.before.age).float()
    share = (germinated / TIMING_EPOCHS).clamp(max=1)
    return TIMING_LEAST + (1 - TIMING_LEAST) * share


def bound_contribution(worth: Tensor, progress: Tensor, combination: Combination) -> Tensor:
    """Return the part of a contribution (0 or more) that counts; unknown `progress` is NaN."""
    made = progress.nan_to_num(0.0).clamp(min=0)
    if combination == "harmonic":
        bounded = 2 * made * worth / (made + worth).clamp(min=torch.finfo(worth.dtype).tiny)
    elif combination == "geometric":
        # Roots first: the product of two tiny numbers underflows to 0.
        bounded = made.sqrt() * worth.clamp(min=0).sqrt()
    else:
        bounded = made
    bounded = torch.where(worth < made, worth, bounded)
    return torch.where(progress.isnan(), UNKNOWN_SHARE * worth, bounded)


def earned_attribution(view: StepView) -> Tensor:
    """Return [R, S]: the bounded contribution, with regress and timing discounts."""
    bounded = bound_contribution(view.contribution, view.progress, view.config.combination)
    return bounded * view.once(regress_discount) * view.once(timing_discount)


def seed_attributions(view: StepView) -> Tensor:
    """Return [R, S]: the attribution of each live seed in this step, 0 elsewhere."""
    worth = view.contribution
    earned = view.once(earned_attribution)
    penalty = view.once(ransomware_penalty) * view.once(timing_discount)
    proxy = PROXY_WEIGHT * view.last_change.clamp(min=0)[:, None]
    usual = torch.where(worth < 0, worth, earned + penalty)
    usual = torch.where(worth.isnan(), proxy, usual)
    # Fossilizing a seed that made the network worse earns nothing.
    harmful = view.did(LifecycleOp.FOSSILIZE) & (view.improvement < 0)
    usual = torch.where(harmful, 0.0, usual)
    # Pruning turns credit into cost and cost into a refund; a penalty stays a penalty.
    debt, credit = _account(view)
    pruned = torch.where(worth < 0, torch.minimum(-worth, debt), penalty - earned)
    pruned = torch.where(worth.isnan(), -proxy - credit, pruned)
    result = torch.where(view.did(LifecycleOp.PRUNE), pruned, usual)
    return torch.where(view.live, result, 0.0)


def attribution(view: StepView) -> Tensor:
    """Return [R]: the mean over the live seeds."""
    return view.mean_over_live(view.once(seed_attributions))


def follow_attribution(view: StepView) -> Changes:
    """Sum up the attributions of each seed, which a prune settles."""
    count = view.live.sum(1, keepdim=True).clamp(min=1)
    paid = view.memory.attribution_paid + view.once(seed_attributions) / count
    return {"attribution_paid": torch.where(view.has_module & view.had_module, paid, 0.0)}


def _account(view: StepView) -> tuple[Tensor, Tensor]:
    """Return [R, S] twice: the largest refund of a prune, and the credit that it takes back.

    Both are per seed, while the attribution that was paid is the mean over the live seeds.
    """
    paid = view.memory.attribution_paid * view.live.sum(1, keepdim=True)
    return (-paid).clamp(min=0), paid.clamp(min=0)


# ---- Escrow: credit that is held back until a seed is fossilized


STABLE_EPOCHS = 3  # Epochs whose least score is the stable one.
MAX_BALANCE_CHANGE = 2.0  # Largest change of a balance in one step.


@dataclass(frozen=True, slots=True)
class Balances:
    """Balances in escrow after one step; float32 [R, S]."""

    paid: Tensor
    """Reward of the step for each seed."""
    balance: Tensor
    """Credit in escrow after it."""


def move_balances(view: StepView) -> Balances:
    """Return the reward of the step for each seed, and the new balances."""
    worth, held = view.contribution, view.memory.balance
    earned = bound_contribution(worth, _stable_progress(view), "geometric")
    goal = (earned + view.once(ransomware_penalty)).clamp(min=0)
    change = (goal - held).clamp(-MAX_BALANCE_CHANGE, MAX_BALANCE_CHANGE)
    # Fossilizing a seed that made the network worse must not pay.
    harmful = view.did(LifecycleOp.FOSSILIZE) & (view.improvement < 0)
    change = torch.where(harmful, change.clamp(max=0), change)
    balance = torch.where(worth < 0, 0.0, held + change)
    paid = torch.where(worth < 0, worth - held, change)
    judged = view.live & ~worth.isnan() & ~_fading(view)
    balance = torch.where(judged, balance, held)
    paid = torch.where(judged, paid, 0.0)
    lost = view.did(LifecycleOp.PRUNE) | (view.had_module & ~view.has_module)
    return Balances(paid=torch.where(lost, -held, paid), balance=torch.where(lost, 0.0, balance))


def escrow_attribution(view: StepView) -> Tensor:
    """Return [R]: change of all balances; a harmful seed also costs its harm."""
    return view.once(move_balances).paid.sum(1)


def escrow(view: StepView) -> Tensor:
    """Return [R], 0 or less: balances of seeds that are not fossilized when the episode ends."""
    balance = view.once(move_balances).balance
    # A rolled-back step changes no balance.
    balance = torch.where(view.rolled_back[:, None], view.memory.balance, balance)
    forfeited = view.ended[:, None] & (view.after.stage != int(SeedStage.FOSSILIZED))
    return -torch.where(forfeited, balance, 0.0).sum(1)


def follow_balances(view: StepView) -> Changes:
    """Remember the balances; an empty slot has none."""
    balance = view.once(move_balances).balance
    return {"balance": torch.where(view.has_module, balance, 0.0)}


def _stable_progress(view: StepView) -> Tensor:
    """Return [R, S]: least score of the last epochs minus that before the seed."""
    recent = view.before.score_history[:, -STABLE_EPOCHS:]
    least = torch.where(recent.isnan(), torch.inf, recent).amin(1)
    return least[:, None] - view.memory.score_before


def _fading(view: StepView) -> Tensor:
    """Return bool [R, S]: the seed is fading out and earns nothing any more."""
    down = view.before.alpha_mode == int(AlphaMode.DOWN)
    return down & (view.before.alpha_target <= 0)


SYNERGY_WEIGHT = 0.1  # Largest bonus for seeds that help each other.
SYNERGY_STEEPNESS = 0.5  # Scale of the sum of interactions inside tanh.
SYNERGY_DISCOUNT = 0.5  # Regress discount below which there is none.


def synergy(view: StepView) -> Tensor:
    """Return [R]: the mean over live seeds of the bonus for their interactions."""
    total = view.before.interaction.sum(2)
    bonus = SYNERGY_WEIGHT * torch.tanh(SYNERGY_STEEPNESS * total)
    sound = view.once(regress_discount) >= SYNERGY_DISCOUNT
    earns = sound & (view.once(seed_attributions) > 0) & (total > 0)
    return view.mean_over_live(torch.where(earns, bonus, 0.0))


def describe_attribution(view: StepView) -> Mapping[str, Tensor]:
    """Return discounts, penalty and ratio of the attribution, of the most suspicious live seed."""
    worth, improvement = view.contribution, view.improvement
    grew = view.live & (improvement > RANSOMWARE_IMPROVEMENT)
    penalty = view.once(ransomware_penalty) * view.once(timing_discount)
    return {
        "regress_discount": _extreme(view.live, view.once(regress_discount), -1),
        "timing_discount": _extreme(view.live, view.once(timing_discount), -1),
        "ransomware_penalty": view.mean_over_live(penalty),
        "attribution_ratio": _extreme(grew & ~worth.isnan(), worth / improvement, 1),
    }


def share_of_shaping(terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the potentials' share of the absolute terms, where there are potentials."""
    if "pbrs" not in terms:
        return {}
    whole = torch.stack(list(terms.values())).abs().sum(0)
    share = terms["pbrs"].abs() / whole
    return {"shaped_reward_ratio": torch.where(whole > 0, share, 0.0)}


def describe_seeds(view: StepView) -> Mapping[str, Tensor]:
    """Return the row's counts after the step, and live seeds that look like ransomware."""
    story = view.once(follow_seeds)
    counts = {
        "seeds_germinated": story["germinated"],
        "seeds_fossilized": story["fossilized"],
        "seeds_contributing": story["fossil_contributes"].sum(1),
        "seeds_pruned": story["removed"],
        "ransomware_seeds": (view.live & holds_hostage(view)).sum(1),
    }
    return {name: count.float() for name, count in counts.items()}


def _extreme(mask: Tensor, values: Tensor, sign: int) -> Tensor:
    """Return [R]: the greatest (sign 1) or least (sign -1) value under the mask, NaN without."""
    bounded = torch.where(mask, sign * values, -torch.inf).amax(1)
    return torch.where(mask.any(1), sign * bounded, torch.nan)


# ---- Hindsight: credit for seeds that boosted a fossil while it grew


HINDSIGHT_WEIGHT = 0.1  # Largest credit of one recorded boost.
HINDSIGHT_STEEPNESS = 0.1  # Scale of boost times improvement inside tanh.
HINDSIGHT_LIMIT = 0.2  # Largest credit of one fossilization.


@dataclass(frozen=True, slots=True)
class Credit:
    """Hindsight credit of a fossilization; float32 [R]."""

    amount: Tensor
    """The credit, 0 without any."""
    scaffolds: Tensor
    """Number of slots with a scaffold of the fossil."""
    delay: Tensor
    """Mean age of the boosts in epochs, NaN without any."""


def earned_credit(view: StepView) -> Credit:
    """Return the credit of this step's fossilization, if any."""
    rows = torch.arange(view.before.rows, device=view.op.device)
    # [R, scaffold, epoch] of the slot the action is about.
    boosts = view.memory.boosts[rows, :, view.transition.actions["slot"]]
    improvement = torch.where(view.did(LifecycleOp.FOSSILIZE), view.improvement, 0.0).sum(1)
    earns = improvement > 0
    entry = (boosts > 0) & earns[:, None, None]
    epochs = torch.arange(boosts.shape[-1], device=boosts.device)
    age = (view.before.epoch[:, None] - epochs).clamp(min=0)[:, None, :]
    size = torch.tanh(HINDSIGHT_STEEPNESS * boosts * improvement[:, None, None])
    credit = torch.where(entry, HINDSIGHT_WEIGHT * size * view.config.gamma**age, 0.0).sum((1, 2))
    delay = torch.where(entry, age, 0).sum((1, 2)) / entry.sum((1, 2))
    return Credit(
        amount=credit.clamp(max=HINDSIGHT_LIMIT),
        scaffolds=entry.any(2).sum(1).float(),
        delay=delay,
    )


def hindsight(view: StepView) -> Tensor:
    """Return [R]: the credit of the previous step, and of this one if it is the last."""
    earned = view.once(earned_credit).amount
    return view.memory.pending + torch.where(view.ended, earned, 0.0)


def follow_scaffolds(view: StepView) -> Changes:
    """Record this epoch's boosts, and clear those of seeds that are fossilized or removed."""
    memory, after = view.memory, view.after
    # Boosts of a fossilized seed are credited; those of a removed seed are void.
    kept = view.has_module & ~view.did(LifecycleOp.FOSSILIZE)
    boosts = torch.where(kept[:, None, :, None], memory.boosts, 0.0)
    # A row whose episode is over may be stepped on beside longer ones.
    epoch = after.epoch.clamp(max=boosts.shape[-1] - 1)
    index = epoch[:, None, None, None].expand(*boosts.shape[:3], 1)
    fresh = torch.where(kept[:, None, :], after.interaction, 0.0).clamp(min=0)
    earned = view.once(earned_credit).amount
    return {
        "boosts": boosts.scatter(3, index, fresh.unsqueeze(3)),
        "pending": torch.where(view.ended, 0.0, earned),
    }


def describe_hindsight(view: StepView) -> Mapping[str, Tensor]:
    """Return the credit of this step with its scaffolds and their delay, paid or not."""
    credit = view.once(earned_credit)
    return {
        "hindsight_credit": credit.amount,
        "scaffold_count": credit.scaffolds,
        "scaffold_delay": credit.delay,
    }
