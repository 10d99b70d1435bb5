"""Escrow: a seed's credit is a balance that is only kept by fossilizing it.

Attribution is the change of the balance, which moves towards what the seed has earned, in bounded
steps. Pruning takes the balance back, fossilizing freezes it, and what is neither at the end is
forfeited. Balances of all slots are summed, so that what is forfeited is what was paid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.simic.rewards.memory import Changes
from esper.simic.rewards.terms.attribution import bound_contribution, ransomware_penalty
from esper.simic.rewards.view import StepView


@dataclass(frozen=True, slots=True)
class Balances:
    """What one step does to the balances; float32 [R, S]."""

    paid: Tensor
    """What the step pays for each seed."""
    balance: Tensor
    """What is in escrow after it."""


def move_balances(view: StepView) -> Balances:
    """Return what the step pays for each seed and what is in escrow then."""
    config, worth, held = view.config.escrow, view.contribution, view.memory.balance
    earned = bound_contribution(
        worth, _stable_progress(view), config.combination, view.config.attribution.unknown_share
    )
    goal = (earned + view.once(ransomware_penalty)).clamp(min=0)
    change = (goal - held).clamp(-config.max_change, config.max_change)
    # Fossilizing what made things worse must not pay.
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
    # A rolled-back step moves no balance: what was held before it is what was paid.
    balance = torch.where(view.rolled_back[:, None], view.memory.balance, balance)
    forfeited = view.ended[:, None] & (view.after.stage != int(SeedStage.FOSSILIZED))
    return -torch.where(forfeited, balance, 0.0).sum(1)


def follow_balances(view: StepView) -> Changes:
    """Remember the balances; an empty slot has none."""
    balance = view.once(move_balances).balance
    return {"balance": torch.where(view.has_module, balance, 0.0)}


def _stable_progress(view: StepView) -> Tensor:
    """Return [R, S]: least score of the last epochs minus that before the seed."""
    recent = view.before.score_history[:, -view.config.escrow.stable_epochs :]
    least = torch.where(recent.isnan(), torch.inf, recent).amin(1)
    return least[:, None] - view.memory.score_before


def _fading(view: StepView) -> Tensor:
    """Return bool [R, S]: the seed is being pruned slowly and earns nothing any more."""
    down = view.before.alpha_mode == int(AlphaMode.DOWN)
    return down & (view.before.alpha_target <= 0)
