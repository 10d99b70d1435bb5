"""The alpha controller: ramps of a seed's amplitude as pure functions over [R, S] tensors.

A ramp starts only from HOLD, moves once per tick along its curve, never overshoots or turns back,
and ends exactly at its target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.leyline.alpha import STEEPNESS, AlphaCurve, AlphaMode


def ramp_fraction(progress: Tensor, curve: Tensor) -> Tensor:
    """Return how far along its way a ramp is, in [0, 1], after `progress` of its ticks."""
    steepness = torch.tensor(STEEPNESS, dtype=progress.dtype, device=progress.device)[curve]
    # A positive stand-in keeps the unused branch of `where` finite.
    k = torch.where(steepness > 0, steepness, torch.ones_like(steepness))
    low, high = torch.sigmoid(-k / 2), torch.sigmoid(k / 2)
    sigmoid = (torch.sigmoid(k * (progress - 0.5)) - low) / (high - low)
    cosine = 0.5 * (1 - torch.cos(torch.pi * progress))
    smooth = torch.where(curve == int(AlphaCurve.COSINE), cosine, progress)
    return torch.where(steepness > 0, sigmoid, smooth)


def retarget(
    state: SlotState, mask: Tensor, target: Tensor, steps: Tensor, curve: Tensor
) -> SlotState:
    """Start a ramp to `target` where `mask`; with zero steps or no distance it is there at once."""
    jump = (steps <= 0) | (target == state.alpha)
    up = target > state.alpha
    mode = torch.where(up, int(AlphaMode.UP), int(AlphaMode.DOWN))
    mode = torch.where(jump, int(AlphaMode.HOLD), mode)
    state = state.where(
        mask,
        alpha_start=state.alpha,
        alpha_target=target,
        alpha_mode=mode,
        alpha_curve=curve,
        steps_total=torch.where(jump, torch.zeros_like(steps), steps),
        steps_done=0,
    )
    return state.where(mask & jump, alpha=target)


def tick_amplitude(state: SlotState, mask: Tensor) -> tuple[SlotState, Tensor]:
    """Advance running ramps by one tick where `mask`; also return where a target was reached."""
    moving = mask & (state.alpha_mode != int(AlphaMode.HOLD))
    done = state.steps_done + 1
    reached = moving & (done >= state.steps_total)
    progress = done.to(state.alpha.dtype) / state.steps_total.clamp(min=1)
    distance = state.alpha_target - state.alpha_start
    alpha = state.alpha_start + distance * ramp_fraction(progress.clamp(max=1.0), state.alpha_curve)
    # Rounding must not let a ramp leave its interval or turn back.
    alpha = torch.where(
        distance > 0, torch.maximum(alpha, state.alpha), torch.minimum(alpha, state.alpha)
    )
    alpha = torch.where(reached, state.alpha_target, alpha).clamp(0.0, 1.0)
    state = state.where(moving, alpha=alpha, steps_done=done)
    return state.where(reached, alpha_mode=int(AlphaMode.HOLD)), reached


def velocity(state: SlotState) -> Tensor:
    """Return the mean change per tick of the running ramp, 0 in HOLD."""
    moving = (state.alpha_mode != int(AlphaMode.HOLD)) & (state.steps_total > 0)
    rate = (state.alpha_target - state.alpha_start) / state.steps_total.clamp(min=1)
    return torch.where(moving, rate, torch.zeros_like(rate))


def time_to_target(state: SlotState) -> Tensor:
    """Return the ticks left of the running ramp, 0 in HOLD."""
    left = (state.steps_total - state.steps_done).clamp(min=0)
    return torch.where(state.alpha_mode != int(AlphaMode.HOLD), left, torch.zeros_like(left))
