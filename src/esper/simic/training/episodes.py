"""Playing episodes with any controller, without learning from them."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.actions import placeholder_actions
from esper.leyline.controller import Controller
from esper.simic.rewards.contract import Reward, Transition
from esper.simic.training.environment import Environment
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.plan import RoundPlan
from esper.simic.training.round_traces import decision_columns, state_columns
from esper.simic.training.trace import Trace
from esper.simic.training.vectorized import masks_to, twin_scores_at


def play_episodes(
    environment: Environment,
    controller: Controller,
    reward: Reward,
    plan: RoundPlan,
    twins: Tensor | None = None,
) -> RoundOutcome:
    """Let a controller play one episode in every row.

    Args:
        environment: the rows.
        controller: who decides.
        reward: what is paid.
        plan: the rows' seeds and tasks.
        twins: float32 [rows, epochs], the waiting twins' scores; None where no twin runs.
    """
    device, rows = environment.device, environment.rows
    signals = environment.reset(plan.env_seeds)
    controller.reset(rows, device)
    reward.reset(signals)
    steps = int((signals.max_epochs - signals.epoch).max())
    decisions, states = Trace(rows, steps), Trace(rows, steps + 1)
    curves = torch.full((rows, 1), torch.nan) if twins is None else twins
    curves = curves.to(device, torch.float32)
    wait = placeholder_actions(rows, device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    names: tuple[str, ...] = ()

    def keep_state(number: int) -> None:
        states.put(number, state_columns(signals, twin_scores_at(curves, signals)))

    keep_state(0)
    for number in range(steps):
        masks = masks_to(environment.masks(), device)
        chosen = controller.act(signals, masks)
        actions = {head: torch.where(active, chosen[head].to(device), wait[head]) for head in wait}
        before, signals = signals, environment.step(actions)
        with torch.no_grad():
            transition = Transition(
                before=before,
                actions=actions,
                after=signals,
                twin_before=twin_scores_at(curves, before),
                twin_after=twin_scores_at(curves, signals),
                is_last=signals.epoch >= signals.max_epochs,
                active=active,
            )
            paid = reward.step(transition)
            names = tuple(paid.terms)
            free = masks.op.sum(1) > 1
            decisions.put(
                number,
                decision_columns(transition, actions["op"], paid, normalized=paid.total, free=free),
            )
            keep_state(number + 1)
            active = active & ~transition.ended
        if not bool(active.any()):
            break
    return RoundOutcome(
        round=plan.round,
        tasks=plan.tasks,
        env_seeds=plan.env_seeds,
        slot_names=plan.slot_names,
        decisions=decisions.read(),
        states=states.read(),
        term_names=names,
        detail_names=(),
        recorded_rows=(),
        recorded_decisions={},
        recorded_states={},
        obs_clamp_share=0.0,
        obs_clamp_features={},
    )
