"""SlotState: the state of every slot of every row, as tensors [R, S], and the gates.

`SlotState` is plain data and never changes in place: the lifecycle functions take one and return
the next. A single garden is the case of one row. Floats are float64 so that scores and amplitudes
compare exactly between engines; `Signals` narrows them for controllers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from esper.leyline.actions import TensorRecord
from esper.leyline.config import Config, option
from esper.leyline.errors import CheckpointError
from esper.leyline.rules import is_in
from esper.leyline.stages import (
    BLENDED_STAGES,
    MODULE_STAGES,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    SeedStage,
)
from esper.utils.storage import check_like, check_range

_MOST = float(2**53)


def _per_slot(
    empty: float, *, least: float | None = None, most: float = _MOST, of_module: bool = False
) -> Any:
    """Declare a tensor [R, S].

    Args:
        empty: its value where a slot is empty; a member of an enumeration allows its values only.
        least: what a saved one may hold at least.
        most: and at most.
        of_module: whether it is reset when the seed's module is freed.
    """
    kind = type(empty) if isinstance(empty, IntEnum) else None
    value = empty if kind is None else int(empty)
    limits = {"kind": kind, "least": least, "most": most}
    return dataclasses.field(metadata={"empty": value, "of_module": of_module, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState(TensorRecord):
    """State of the seeds; each field declares its value for an empty slot."""

    stage: Tensor = _per_slot(SeedStage.DORMANT)
    """int64, a `SeedStage`."""
    blueprint: Tensor = _per_slot(-1)
    """int64, blueprint id, -1 where empty."""
    algorithm: Tensor = _per_slot(AlphaAlgorithm.ADD)
    """int64, an `AlphaAlgorithm`."""
    ramp: Tensor = _per_slot(AlphaCurve.LINEAR)
    """int64, `AlphaCurve` of the first blend."""
    tempo: Tensor = _per_slot(0, least=0)
    """int64, ticks of the first blend."""
    blend_target: Tensor = _per_slot(0.0, least=0, most=1)
    """float64, amplitude the first blend aims for."""
    alpha: Tensor = _per_slot(0.0, least=0, most=1, of_module=True)
    """float64, amplitude now."""
    alpha_start: Tensor = _per_slot(0.0, least=0, most=1, of_module=True)
    """float64, amplitude at the start of the running ramp."""
    alpha_target: Tensor = _per_slot(0.0, least=0, most=1, of_module=True)
    """float64, amplitude the running ramp aims for."""
    alpha_mode: Tensor = _per_slot(AlphaMode.HOLD, of_module=True)
    """int64, an `AlphaMode`."""
    alpha_curve: Tensor = _per_slot(AlphaCurve.LINEAR)
    """int64, `AlphaCurve` of the running ramp."""
    steps_total: Tensor = _per_slot(0, least=0, of_module=True)
    """int64, ticks of the running ramp."""
    steps_done: Tensor = _per_slot(0, least=0, of_module=True)
    """int64, ticks of it that have passed."""
    epochs_in_stage: Tensor = _per_slot(0, least=0)
    """int64, epochs recorded since the stage began."""
    age: Tensor = _per_slot(0, least=0)
    """int64, epochs recorded since germination."""
    learned: Tensor = _per_slot(0, least=0)
    """int64, epochs recorded since it began to learn, that is, since it entered TRAINING."""
    previous_stage: Tensor = _per_slot(SeedStage.UNKNOWN)
    """int64, the stage before this one."""
    previous_epochs: Tensor = _per_slot(0, least=0)
    """int64, how many epochs the stage before lasted."""
    cooldown: Tensor = _per_slot(0, least=0, of_module=True)
    """int64, ticks spent embargoed."""
    params: Tensor = _per_slot(0, least=0, of_module=True)
    """int64, parameters of the seed and its gate."""
    score_initial: Tensor = _per_slot(math.nan)
    """float64, score at the first record after germination, NaN before it."""
    score_stage: Tensor = _per_slot(math.nan)
    """float64, score when the stage began, NaN before the first record."""
    score_now: Tensor = _per_slot(math.nan)
    """float64, score at the last record, NaN before the first."""
    grad_norm: Tensor = _per_slot(0.0, of_module=True)
    """float64, global L2 norm of the seed's gradient."""
    grad_health: Tensor = _per_slot(1.0, of_module=True)
    """float64, 1 is healthy."""
    grad_health_prev: Tensor = _per_slot(1.0, of_module=True)
    """float64, health of the epoch before."""
    grad_ratio: Tensor = _per_slot(math.nan)
    """float64, per-parameter gradient size relative to the host's, NaN before it is measured."""
    vanishing: Tensor = _per_slot(False, of_module=True)
    """bool, some gradient tensor has vanished."""
    exploding: Tensor = _per_slot(False, of_module=True)
    """bool, some gradient tensor explodes."""
    contribution: Tensor = _per_slot(math.nan, of_module=True)
    """float64, points lost without this seed, NaN before the first ablation."""
    contribution_se: Tensor = _per_slot(math.nan, of_module=True)
    """float64, paired standard error of it."""
    contribution_velocity: Tensor = _per_slot(0.0, of_module=True)
    """float64, smoothed change of it."""
    counterfactual_age: Tensor = _per_slot(-1, least=-1, of_module=True)
    """int64, epochs since the last ablation, -1 before the first."""
    doublings: Tensor = _per_slot(0, least=0, most=6, of_module=True)
    """int64, how often the copies in the slot were doubled: they are 2 ** (doublings + 1) - 1; 0
    for seeds that are no copies."""
    untrained: Tensor = _per_slot(False, of_module=True)
    """bool, no optimizer has changed its parameters yet; only gardens set it."""
    interaction: Tensor
    """float64 [R, S, S], points two seeds gain together beyond the sum of each alone."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stage.shape[0]

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.stage.shape[1]

    @property
    def has_module(self) -> Tensor:
        """Return bool [R, S]: whether the slot holds a seed module."""
        return is_in(self.stage, MODULE_STAGES)

    @property
    def occupied(self) -> Tensor:
        """Return bool [R, S]: whether the slot has a record."""
        return self.stage > int(SeedStage.DORMANT)

    @property
    def stage_improvement(self) -> Tensor:
        """Return float64 [R, S]: score now minus score when the stage began."""
        return self.score_now - self.score_stage

    def where(self, mask: Tensor, **values: Tensor | float | int | bool) -> SlotState:
        """Return a copy in which the named fields take new values where `mask` is true."""
        changed: dict[str, Tensor] = {}
        for name, value in values.items():
            old: Tensor = getattr(self, name)
            new = torch.as_tensor(value, dtype=old.dtype, device=old.device)
            condition = mask if old.dim() == mask.dim() else mask.unsqueeze(-1)
            changed[name] = torch.where(condition, new, old)
        return dataclasses.replace(self, **changed)

    def clear(self, mask: Tensor, fields: Iterable[str] | None = None) -> SlotState:
        """Return a copy in which the slots under `mask` are empty, or only these fields of them.

        Their interactions go too.
        """
        cleared = self.where(mask, **{name: EMPTY[name] for name in fields or EMPTY})
        touched = mask.unsqueeze(-1) | mask.unsqueeze(-2)
        interaction = torch.where(touched, torch.zeros_like(self.interaction), self.interaction)
        return dataclasses.replace(cleared, interaction=interaction)


EMPTY: dict[str, float | int | bool] = {
    field.name: field.metadata["empty"]
    for field in dataclasses.fields(SlotState)
    if "empty" in field.metadata
}
"""The value of every per-slot field where the slot is empty; interactions are zero."""

OF_THE_MODULE = tuple(
    field.name for field in dataclasses.fields(SlotState) if field.metadata.get("of_module")
)
"""The fields that are reset when the seed's module is freed."""


def check_state(saved: Mapping[str, Any], like: SlotState, blueprints: int) -> SlotState:
    """Return a saved `state_dict` as a state, or refuse impossible values.

    Args:
        saved: by field.
        like: a state of as many rows and slots.
        blueprints: how many there are.
    """
    check_like(saved, like.state_dict(), "state")
    for field in dataclasses.fields(SlotState):
        name, kind, least = field.name, field.metadata.get("kind"), field.metadata.get("least")
        if least is not None:
            check_range(saved[name], least, field.metadata["most"], f"state.{name}")
        if kind is None:
            continue
        legal = torch.tensor([int(member) for member in kind], device=saved[name].device)
        if not bool(torch.isin(saved[name], legal).all()):
            raise CheckpointError(
                f"the saved state is damaged: state.{name} has values that are no {kind.__name__}; "
                "use another copy of it"
            )
    state = SlotState.from_state_dict(dict(saved))
    check_range(state.blueprint, -1, blueprints - 1, "state.blueprint")
    check_range(state.blueprint[state.has_module], 0, blueprints - 1, "state.blueprint of a seed")
    return state


def empty_state(rows: int, slots: int, device: torch.device | str = "cpu") -> SlotState:
    """Return the state of `rows` hosts in which nothing has grown."""

    def full(value: float | int | bool) -> Tensor:
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        return torch.full((rows, slots), value, dtype=dtype, device=device)

    fields = {name: full(value) for name, value in EMPTY.items()}
    interaction = torch.zeros((rows, slots, slots), dtype=torch.float64, device=device)
    return SlotState(**fields, interaction=interaction)


# ---- The gates G0 to G5: is a seed ready for its next stage?


_REACHED = 1e-6


# What the strict gates ask for beside what is set.
MIN_IMPROVEMENT = 0.5  # Points the host must have gained during TRAINING.
MIN_GRADIENT_RATIO = 0.1  # Least gradient of the seed relative to the host's.
MIN_CONTRIBUTION = 1.0  # Points a seed must contribute to fossilize.


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
        & (state.stage_improvement >= MIN_IMPROVEMENT)
        & (state.grad_ratio >= MIN_GRADIENT_RATIO)
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
        ready = ready & (state.contribution >= MIN_CONTRIBUTION)
    return ready


def inert_seeds(state: SlotState) -> Tensor:
    """Return bool [R, S]: seeds that a finished network does without.

    These are seeds that are not blended in, those that nothing has trained, and holding ones whose
    measured contribution is 0 ± 0. Fossils stay.
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
                f"{config.min_gradient_health}, it is {health:.2f}; lower the learning rate"
            )
        return (
            f"gate G2 (strict) needs a gain of {MIN_IMPROVEMENT} points during TRAINING "
            f"and a gradient ratio of {MIN_GRADIENT_RATIO}; they are "
            f"{float(state.stage_improvement[0, slot]):.2f} and "
            f"{float(state.grad_ratio[0, slot]):.2f}"
        )
    if stage is SeedStage.BLENDING:
        alpha, target = float(state.alpha[0, slot]), float(state.alpha_target[0, slot])
        if strict and alpha >= 1:
            done = int(state.epochs_in_stage[0, slot])
            needed = config.min_blending_epochs
            return f"gate G3 (strict) waits for {needed} epochs in BLENDING, {done} are over"
        return f"gate G3 waits for alpha to hold at 1; it is {alpha:.2f} on its way to {target:.2f}"
    if stage is SeedStage.HOLDING:
        if not bool(torch.isfinite(state.contribution[0, slot])):
            return (
                "gate G5 waits for a measured contribution; gardener.step(evaluate) measures it "
                "every `ablate_every` epochs"
            )
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
                f"gate G5 (strict) needs a contribution of {MIN_CONTRIBUTION} points, it is "
                f"{float(state.contribution[0, slot]):.2f}"
            )
        health = float(state.grad_health[0, slot])
        return (
            f"gate G5 needs gradients that do not explode and a health of "
            f"{config.min_gradient_health}, it is {health:.2f}; lower the learning rate"
        )
    return f"no gate leads on from {stage.name}; germinate a seed first"
