"""The bonus for the first germination of an episode, and its return.

The bonus invites a controller that only waits to try something. It is taken back, with interest at
the discount rate, when that seed is removed or was never blended by the end: planting and pruning
must not pay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.stages import SeedStage
from esper.simic.rewards.memory import NO_SLOT, Changes
from esper.simic.rewards.view import StepView

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
