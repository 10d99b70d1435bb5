"""The gates G0 to G5: is a seed ready for its next stage?

Legality (`leyline.rules`) says whether an operation may be asked for; a gate says whether it
succeeds. Both kinds of gates are the same functions with other thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaMode
from esper.leyline.config import Config, option
from esper.leyline.rules import is_in
from esper.leyline.stages import BLENDED_STAGES, SeedStage

_REACHED = 1e-6


@dataclass(frozen=True, kw_only=True)
class GateConfig(Config):
    """Thresholds of the gates."""

    kind: Literal["permissive", "strict"] = option(
        "permissive", "Permissive leaves the judgement to the controller; strict demands proof."
    )
    min_training_epochs: int = option(
        10, "Epochs in TRAINING before a seed may blend (both kinds).", minimum=0
    )
    min_blending_epochs: int = option(
        10, "Strict: epochs in BLENDING before a seed may hold.", minimum=0
    )
    min_gradient_health: float = option(
        0.7, "Gradient health a seed needs to blend and to fossilize.", minimum=0.0, maximum=1.0
    )
    min_improvement: float = option(
        0.5, "Strict: points the host must have gained during TRAINING.", minimum=0.0
    )
    min_gradient_ratio: float = option(
        0.10, "Strict: least gradient of the seed relative to the host's.", minimum=0.0
    )
    min_contribution: float = option(
        1.0, "Strict: points a seed must contribute to fossilize.", minimum=0.0
    )
    needs_effect: ClassVar[bool] = False
    """Whether G5 keeps only seeds whose measured contribution is not 0 ± 0."""


@dataclass(frozen=True, kw_only=True)
class EarnedGates(GateConfig):
    """The gates of a garden: the same thresholds, and nothing is kept that makes no difference.

    No setting: a population does as the documents say, and a garden never keeps such a seed.
    """

    needs_effect: ClassVar[bool] = True

    @classmethod
    def like(cls, gates: GateConfig) -> EarnedGates:
        """Return gates with the thresholds of others."""
        return cls(**gates.to_mapping())


def is_healthy(state: SlotState, config: GateConfig) -> Tensor:
    """Return whether the seed's gradients neither explode nor ail."""
    return ~state.exploding & (state.grad_health >= config.min_gradient_health)


def germinate_gate(blueprint: Tensor) -> Tensor:
    """G0: a blueprint is named."""
    return blueprint > 0


def training_gate(state: SlotState) -> Tensor:
    """G1: the seed is germinated."""
    return state.stage == int(SeedStage.GERMINATED)


def blending_gate(state: SlotState, config: GateConfig) -> Tensor:
    """G2: the seed has trained long enough and its gradients are sound."""
    ready = state.stage == int(SeedStage.TRAINING)
    ready = ready & (state.epochs_in_stage >= config.min_training_epochs)
    if config.kind == "permissive":
        return ready & is_healthy(state, config)
    # NaN (never measured) compares false and so fails, as it must.
    return (
        ready
        & (state.stage_improvement >= config.min_improvement)
        & (state.grad_ratio >= config.min_gradient_ratio)
    )


def holding_gate(state: SlotState, config: GateConfig) -> Tensor:
    """G3: the amplitude has reached a full target and holds."""
    ready = (
        (state.stage == int(SeedStage.BLENDING))
        & (state.alpha_target >= 1.0 - _REACHED)
        & ((state.alpha - state.alpha_target).abs() <= _REACHED)
        & (state.alpha_mode == int(AlphaMode.HOLD))
    )
    if config.kind == "strict":
        ready = ready & (state.epochs_in_stage >= config.min_blending_epochs)
    return ready


def has_no_effect(state: SlotState) -> Tensor:
    """Return whether a measured contribution is 0 ± 0: no sample is answered differently."""
    return (state.contribution == 0) & (state.contribution_se == 0)


def fossilize_gate(state: SlotState, config: GateConfig) -> Tensor:
    """G5: the seed was trained, its contribution is measured, and its gradients are sound.

    A garden keeps nothing for good that makes no difference to any sample.
    """
    ready = (
        (state.stage == int(SeedStage.HOLDING))
        & torch.isfinite(state.contribution)
        & ~state.untrained
        & is_healthy(state, config)
    )
    if config.needs_effect:
        ready = ready & ~has_no_effect(state)
    if config.kind == "strict":
        ready = ready & (state.contribution >= config.min_contribution)
    return ready


def inert_seeds(state: SlotState) -> Tensor:
    """Return bool [R, S]: what a finished network goes on without.

    These are seeds that are not blended in or gone already, those that nothing has trained, and
    holding ones whose measured contribution is 0 ± 0. Fossils stay.
    """
    changes_outputs = is_in(state.stage, BLENDED_STAGES) & (state.alpha > 0)
    is_idle = (state.stage == int(SeedStage.HOLDING)) & has_no_effect(state)
    unearned = (state.untrained | is_idle) & (state.stage != int(SeedStage.FOSSILIZED))
    return state.occupied & (unearned | ~changes_outputs)


def describe_failure(state: SlotState, slot: int, config: GateConfig) -> str:
    """Say what the gate of a seed's next stage waits for; one row."""
    stage = SeedStage(int(state.stage[0, slot]))
    strict = config.kind == "strict"
    if stage is SeedStage.TRAINING:
        done = int(state.epochs_in_stage[0, slot])
        if done < config.min_training_epochs:
            needed = config.min_training_epochs
            return f"gate G2 waits for {needed} epochs in TRAINING, {done} are over"
        health = float(state.grad_health[0, slot])
        if not strict:
            return (
                f"gate G2 needs gradients that do not explode and a health of "
                f"{config.min_gradient_health}, it is {health:.2f}"
            )
        return (
            f"gate G2 (strict) needs a gain of {config.min_improvement} points during TRAINING "
            f"and a gradient ratio of {config.min_gradient_ratio}; they are "
            f"{float(state.stage_improvement[0, slot]):.2f} and "
            f"{float(state.grad_ratio[0, slot]):.2f}"
        )
    if stage is SeedStage.BLENDING:
        alpha, target = float(state.alpha[0, slot]), float(state.alpha_target[0, slot])
        if strict and alpha >= 1:
            return f"gate G3 (strict) waits for {config.min_blending_epochs} epochs in BLENDING"
        return f"gate G3 waits for alpha to hold at 1; it is {alpha:.2f} on its way to {target:.2f}"
    if stage is SeedStage.HOLDING:
        if not bool(torch.isfinite(state.contribution[0, slot])):
            return "gate G5 waits for a measured contribution"
        if bool(state.untrained[0, slot]):
            return (
                "gate G5 keeps no seed that nothing has trained, and this one's parameters are as "
                "they were drawn; make the optimizer by gardener.optimizer(...), or add "
                "garden.slot_parameters(slot) to yours"
            )
        if config.needs_effect and bool(has_no_effect(state)[0, slot]):
            return (
                "gate G5 keeps no seed that makes no difference: its measured contribution is "
                "0 ± 0 points; train it further, or prune it"
            )
        if strict:
            return (
                f"gate G5 (strict) needs a contribution of {config.min_contribution} points, it is "
                f"{float(state.contribution[0, slot]):.2f}"
            )
        return "gate G5 needs healthy gradients"
    return "the gate did not pass"
