"""Bounded attribution: what of a seed's contribution is paid for, and its guards.

A contribution is the points lost when a seed is switched off. A host that has come to lean on a
seed loses points without it although it gained none by it, so the contribution is bounded by the
progress since germination, discounted where the network got worse (regress), early seeds count less
(timing), and contributions out of proportion cost something (ransomware).

Every step is attributed to the mean over the live seeds; the op changes the part of the seed it is
about. With one live seed that is the seed's own attribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards.config import Combination
from esper.simic.rewards.memory import Changes
from esper.simic.rewards.view import StepView


def regress_discount(view: StepView) -> Tensor:
    """Return [R, S]: 1 where the network is no worse than at the seed's start, less where it is."""
    fallen = torch.sigmoid(view.config.attribution.regress_steepness * view.improvement)
    return torch.where(view.improvement >= 0, 1.0, fallen)


def ransomware_penalty(view: StepView) -> Tensor:
    """Return [R, S], 0 or less: credit far beyond what the network has gained."""
    config = view.config.ransomware
    worth, improvement = view.contribution, view.improvement
    if view.config.disable_anti_gaming:
        return torch.zeros_like(worth)
    excess = worth / improvement - config.max_ratio
    by_ratio = config.ratio_weight * excess.clamp(min=0) / config.max_ratio
    by_size = config.limit * (worth / config.contribution_scale).clamp(max=1)
    grew = improvement > config.min_improvement
    penalty = torch.where(grew, by_ratio.clamp(max=config.limit), by_size)
    suspect = worth > config.min_contribution
    suspect &= view.once(regress_discount) >= config.min_discount
    return torch.where(suspect, -penalty, 0.0)


def timing_discount(view: StepView) -> Tensor:
    """Return [R, S]: less than 1 for seeds germinated while the host still learned by itself."""
    config = view.config.timing
    if view.config.disable_timing_discount or config.epochs == 0:
        return torch.ones_like(view.contribution)
    germinated = (view.before.epoch[:, None] - view.before.age).float()
    share = (germinated / config.epochs).clamp(max=1)
    return config.least + (1 - config.least) * share


def bound_contribution(
    worth: Tensor, progress: Tensor, combination: Combination, unknown_share: float
) -> Tensor:
    """Return how much of a contribution of at least 0 counts; `progress` is NaN where unknown."""
    made = progress.nan_to_num(0.0).clamp(min=0)
    if combination == "harmonic":
        bounded = 2 * made * worth / (made + worth).clamp(min=torch.finfo(worth.dtype).tiny)
    elif combination == "geometric":
        # Roots first: the product of two tiny numbers is 0.
        bounded = made.sqrt() * worth.clamp(min=0).sqrt()
    else:
        bounded = made
    bounded = torch.where(worth < made, worth, bounded)
    return torch.where(progress.isnan(), unknown_share * worth, bounded)


def earned_attribution(view: StepView) -> Tensor:
    """Return [R, S]: what of the contribution counts, with regress and timing discounts."""
    config = view.config.attribution
    bounded = bound_contribution(
        view.contribution, view.progress, config.combination, config.unknown_share
    )
    return bounded * view.once(regress_discount) * view.once(timing_discount)


def seed_attributions(view: StepView) -> Tensor:
    """Return [R, S]: what each live seed is credited with in this step, 0 for all others."""
    worth = view.contribution
    earned = view.once(earned_attribution)
    penalty = view.once(ransomware_penalty) * view.once(timing_discount)
    proxy = view.config.attribution.proxy_weight * view.last_change.clamp(min=0)[:, None]
    usual = torch.where(worth < 0, worth, earned + penalty)
    usual = torch.where(worth.isnan(), proxy, usual)
    # To fossilize what made things worse earns nothing.
    harmful = view.did(LifecycleOp.FOSSILIZE) & (view.improvement < 0)
    usual = torch.where(harmful, 0.0, usual)
    # To prune turns credit into cost and cost into a refund; a penalty stays a penalty.
    debt, credit = _account(view)
    pruned = torch.where(worth < 0, torch.minimum(-worth, debt), penalty - earned)
    pruned = torch.where(worth.isnan(), -proxy - credit, pruned)
    result = torch.where(view.did(LifecycleOp.PRUNE), pruned, usual)
    return torch.where(view.live, result, 0.0)


def attribution(view: StepView) -> Tensor:
    """Return [R]: the mean over the live seeds."""
    return view.mean_over_live(view.once(seed_attributions))


def follow_attribution(view: StepView) -> Changes:
    """Add up what each seed has been credited with, for the account a prune settles."""
    count = view.live.sum(1, keepdim=True).clamp(min=1)
    paid = view.memory.attribution_paid + view.once(seed_attributions) / count
    return {"attribution_paid": torch.where(view.has_module & view.had_module, paid, 0.0)}


def _account(view: StepView) -> tuple[Tensor, Tensor]:
    """Return [R, S] twice: the most a prune refunds, and the least it returns.

    Both are in the units of one seed's part: what was paid was the mean over the live seeds.
    """
    if not view.config.attribution.settles_prunes:
        nothing = torch.zeros_like(view.contribution)
        return nothing + torch.inf, nothing
    paid = view.memory.attribution_paid * view.live.sum(1, keepdim=True)
    return (-paid).clamp(min=0), paid.clamp(min=0)
